// Live objects by the pointer that the caller holds. A stale or foreign handle is answered with null, never
// followed; an object in use by a call outlives its destruction.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

template <class T>
class Handles {
 public:
  T* add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    T* handle = object.get();
    live_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<T> get(T* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(handle);
    return found == live_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> remove(T* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(handle);
    if (found == live_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    live_.erase(found);
    return object;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<T*, std::shared_ptr<T>> live_;
};
