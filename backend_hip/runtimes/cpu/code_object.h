// The frame around a compiled module: how hipModuleLoadData, which gets only a pointer, knows what it holds.
#pragma once

#include <cstdint>

constexpr char kCodeMagic[16] = "ASSAY CPU CODE1";

struct CodeHeader {
  char magic[16];
  uint64_t nbytes;  // of the shared library that follows
  uint64_t hash;    // FNV-1a of it: a truncated or patched buffer is refused
};

inline uint64_t code_hash(const unsigned char* bytes, uint64_t nbytes) {
  uint64_t hash = 14695981039346656037u;
  for (uint64_t i = 0; i < nbytes; ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  return hash;
}
