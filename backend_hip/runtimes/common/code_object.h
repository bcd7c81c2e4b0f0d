// The frame around a compiled module: how hipModuleLoadData, which gets only a pointer, knows what it holds.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using CodeMagic = char[16];
constexpr CodeMagic kCpuCode = "ASSAY CPU CODE1";
constexpr CodeMagic kCudaCode = "ASSAY CUDA CODE";

struct CodeHeader {
  CodeMagic magic;
  uint64_t nbytes;  // of the content that follows
  uint64_t hash;    // FNV-1a of it: a truncated or patched buffer is refused
};

inline uint64_t code_hash(const unsigned char* bytes, uint64_t nbytes) {
  uint64_t hash = 14695981039346656037u;
  for (uint64_t i = 0; i < nbytes; ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  return hash;
}

inline std::vector<char> frame_code(const CodeMagic& magic, const std::string& content) {
  CodeHeader header{};
  std::memcpy(header.magic, magic, sizeof header.magic);
  header.nbytes = content.size();
  header.hash = code_hash(reinterpret_cast<const unsigned char*>(content.data()), content.size());
  const auto* raw = reinterpret_cast<const char*>(&header);
  std::vector<char> framed(raw, raw + sizeof header);
  framed.insert(framed.end(), content.begin(), content.end());
  return framed;
}

struct CodeContent {
  const unsigned char* bytes = nullptr;  // inside the image; null where `problem` says why
  uint64_t nbytes = 0;
  const char* problem = nullptr;
};

inline CodeContent open_code(const CodeMagic& magic, const void* image) {
  // The magic alone first: a foreign image may be shorter than the header.
  if (std::strncmp(static_cast<const char*>(image), magic, sizeof magic) != 0)
    return {nullptr, 0, "the code object is not one that this runtime compiled"};
  CodeHeader header;
  std::memcpy(&header, image, sizeof header);
  const unsigned char* bytes = static_cast<const unsigned char*>(image) + sizeof header;
  if (header.hash != code_hash(bytes, header.nbytes))
    return {nullptr, 0, "the code object is damaged: its hash differs"};
  return {bytes, header.nbytes, nullptr};
}
