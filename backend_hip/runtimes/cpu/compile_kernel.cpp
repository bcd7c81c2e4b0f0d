// The kernel compiler of libhiprtc.so: the C++ compiler that built this library. The command, one argument a
// line, stands in `compiler.txt` next to it; sources and output are added here.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "code_object.h"
#include "hiprtc.h"

extern char** environ;

namespace {
namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> compiler_command() {
  Dl_info info{};
  std::vector<std::string> command;
  if (dladdr(reinterpret_cast<const void*>(&compiler_command), &info) == 0) return command;
  std::ifstream file(fs::path(info.dli_fname).parent_path() / "compiler.txt");
  for (std::string line; std::getline(file, line);) command.push_back(line);
  return command;
}

// Runs the command in `folder` with its output in `log_path`. Says how it failed, nothing when it did not.
std::string run(const std::vector<std::string>& command, const fs::path& folder, const fs::path& log_path) {
  std::vector<char*> arguments;
  for (const std::string& each : command) arguments.push_back(const_cast<char*>(each.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t child = 0;
  const int error = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return std::string("could not be started: ") + std::strerror(error);
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return std::string("could not be waited for: ") + std::strerror(errno);
  if (WIFSIGNALED(status))
    return "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")";
  const int code = WEXITSTATUS(status);
  return code == 0 ? "" : "ended with status " + std::to_string(code);
}

// A folder that goes with its contents.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::error_code ignored;
    std::string pattern = (fs::temp_directory_path(ignored) / "assay-XXXXXX").string();
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};
}  // namespace

ASSAY_API const char* assay_runtime_cpu() { return "assay cpu runtime"; }

hiprtcResult compile_program(Program& program, const CompileOptions& options) {
  std::vector<std::string> command = compiler_command();
  if (command.empty()) {
    program.log = "assay: compiler.txt is missing next to libhiprtc.so";
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  // The architecture is this machine.
  command.insert(command.end(), options.defines.begin(), options.defines.end());
  if (!options.standard.empty()) command.push_back(options.standard);
  const ScratchFolder scratch;
  if (scratch.path().empty()) {
    program.log = "assay: cannot make a temporary folder (TMPDIR)";
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  // Fixed relative names: the code object must not depend on where it was compiled.
  std::ofstream(scratch.path() / "kernel.cpp", std::ios::binary)
      << "#line 1 \"" << program.name << "\"\n" << program.source;
  command.insert(command.end(), {"-o", "kernel.so", "kernel.cpp"});
  std::string failure = run(command, scratch.path(), scratch.path() / "log");
  program.log = read_file(scratch.path() / "log");
  const std::string library = read_file(scratch.path() / "kernel.so");
  if (failure.empty() && library.empty()) failure = "ended with status 0 but wrote no output";
  if (!failure.empty()) {
    program.log += "assay: " + command.front() + " " + failure + "\n";
    return HIPRTC_ERROR_COMPILATION;
  }
  program.code = frame_code(kCpuCode, library);
  return HIPRTC_SUCCESS;
}
