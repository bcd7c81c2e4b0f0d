// libhiprtc.so: compiles kernels with the C++ compiler that built this library. The command, one argument a
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
#include "handles.h"
#include "hip_types.h"

extern char** environ;

enum hiprtcResult : int {
  HIPRTC_SUCCESS = 0,
  HIPRTC_ERROR_OUT_OF_MEMORY = 1,
  HIPRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
  HIPRTC_ERROR_INVALID_INPUT = 3,
  HIPRTC_ERROR_INVALID_PROGRAM = 4,
  HIPRTC_ERROR_INVALID_OPTION = 5,
  HIPRTC_ERROR_COMPILATION = 6,
  HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE = 7,
  HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
  HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
  HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
  HIPRTC_ERROR_INTERNAL_ERROR = 11,
};

struct Program {
  std::string source, name, log;
  std::vector<char> code;
};

namespace {
namespace fs = std::filesystem;

Handles<Program>& programs() {
  static auto* handles = new Handles<Program>;
  return *handles;
}

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

// Appends what the option means here. False: not an option that every runtime knows.
bool translate(const std::string& option, std::vector<std::string>& command) {
  const auto starts = [&](const char* prefix) { return option.rfind(prefix, 0) == 0; };
  if (starts("-D") && option.size() > 2) {
    command.push_back(option);
    return true;
  }
  if (starts("--offload-arch=")) return true;  // the architecture is this machine
  // Contraction is off in the fixed part of the command; -O3 too.
  if (option == "-ffp-contract=off" || option == "-O3") return true;
  if (option == "-std=c++17" || option == "-std=c++20") {
    command.push_back(option);
    return true;
  }
  return false;
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

hiprtcResult compile(Program& program, int option_count, const char* const* options) {
  program.code.clear();
  program.log.clear();
  std::vector<std::string> command = compiler_command();
  if (command.empty()) {
    program.log = "assay: compiler.txt is missing next to libhiprtc.so";
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  for (int i = 0; i < option_count; ++i)
    if (!translate(options[i], command)) {
      program.log = "assay: unknown option " + std::string(options[i]) +
                    "; known: -DNAME=VALUE -std=c++17 -std=c++20 -O3 -ffp-contract=off --offload-arch=ARCH";
      return HIPRTC_ERROR_INVALID_OPTION;
    }
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
  CodeHeader header{};
  std::memcpy(header.magic, kCodeMagic, sizeof kCodeMagic);
  header.nbytes = library.size();
  header.hash = code_hash(reinterpret_cast<const unsigned char*>(library.data()), library.size());
  const auto* raw = reinterpret_cast<const char*>(&header);
  program.code.assign(raw, raw + sizeof header);
  program.code.insert(program.code.end(), library.begin(), library.end());
  return HIPRTC_SUCCESS;
}
}  // namespace

ASSAY_API const char* assay_runtime_cpu() { return "assay cpu runtime"; }

ASSAY_API const char* hiprtcGetErrorString(hiprtcResult result) {
  switch (result) {
    case HIPRTC_SUCCESS: return "HIPRTC_SUCCESS";
    case HIPRTC_ERROR_OUT_OF_MEMORY: return "HIPRTC_ERROR_OUT_OF_MEMORY";
    case HIPRTC_ERROR_PROGRAM_CREATION_FAILURE: return "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case HIPRTC_ERROR_INVALID_INPUT: return "HIPRTC_ERROR_INVALID_INPUT";
    case HIPRTC_ERROR_INVALID_PROGRAM: return "HIPRTC_ERROR_INVALID_PROGRAM";
    case HIPRTC_ERROR_INVALID_OPTION: return "HIPRTC_ERROR_INVALID_OPTION";
    case HIPRTC_ERROR_COMPILATION: return "HIPRTC_ERROR_COMPILATION";
    case HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE: return "HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE";
    case HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION: return "HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION";
    case HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION: return "HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION";
    case HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID: return "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    case HIPRTC_ERROR_INTERNAL_ERROR: return "HIPRTC_ERROR_INTERNAL_ERROR";
  }
  return "Invalid HIPRTC error code";
}

ASSAY_API hiprtcResult hiprtcVersion(int* major, int* minor) {
  if (major == nullptr || minor == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  *major = 9;
  *minor = 0;
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcCreateProgram(Program** out, const char* source, const char* name, int header_count,
                                           const char* const*, const char* const*) {
  if (out == nullptr || source == nullptr || header_count != 0) return HIPRTC_ERROR_INVALID_INPUT;
  auto program = std::make_shared<Program>();
  program->source = source;
  program->name = name != nullptr && *name != '\0' ? name : "kernel";
  for (char& each : program->name)
    if (each == '"' || each == '\\' || each == '\n') each = '_';  // it goes into a #line directive
  *out = programs().add(std::move(program));
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcDestroyProgram(Program** handle) {
  if (handle == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  if (programs().remove(*handle) == nullptr) return HIPRTC_ERROR_INVALID_PROGRAM;
  *handle = nullptr;
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcCompileProgram(Program* handle, int option_count, const char* const* options) {
  const auto program = programs().get(handle);
  if (program == nullptr) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (option_count < 0 || (option_count > 0 && options == nullptr)) return HIPRTC_ERROR_INVALID_INPUT;
  return compile(*program, option_count, options);
}

// A log's size counts the terminating zero, as NVRTC's does.
ASSAY_API hiprtcResult hiprtcGetProgramLogSize(Program* handle, size_t* nbytes) {
  const auto program = programs().get(handle);
  if (program == nullptr || nbytes == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  *nbytes = program->log.size() + 1;
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcGetProgramLog(Program* handle, char* log) {
  const auto program = programs().get(handle);
  if (program == nullptr || log == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcGetCodeSize(Program* handle, size_t* nbytes) {
  const auto program = programs().get(handle);
  if (program == nullptr || nbytes == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  if (program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;  // not compiled
  *nbytes = program->code.size();
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcGetCode(Program* handle, char* code) {
  const auto program = programs().get(handle);
  if (program == nullptr || code == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  if (program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;
  std::memcpy(code, program->code.data(), program->code.size());
  return HIPRTC_SUCCESS;
}
