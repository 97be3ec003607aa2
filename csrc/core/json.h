// The subset of JSON that introspection needs: it reads flat objects, and writes objects and arrays.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace flash_cute {

// A flat object of numbers, strings, true and false. Fields of a wrong kind or out of bounds, and fields that were not
// read, raise std::invalid_argument with the field's name.
class JsonFields {
 public:
  explicit JsonFields(const std::string& text);

  bool has(const std::string& name) const { return fields_.count(name) > 0; }
  std::string text(const std::string& name, const std::string& otherwise);
  bool flag(const std::string& name);  // false if it is not there
  double number(const std::string& name, double otherwise);
  int64_t integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most);
  void end() const;  // throws if a field was never read

 private:
  const std::string* find(const std::string& name);
  std::map<std::string, std::string> fields_;  // as written, strings with their quotes
  std::string known_;
};

// Builds an object field by field.
class JsonObject {
 public:
  JsonObject& text(const char* name, const std::string& value);
  JsonObject& flag(const char* name, bool value) { return raw(name, value ? "true" : "false"); }
  JsonObject& integer(const char* name, int64_t value) { return raw(name, std::to_string(value)); }
  JsonObject& number(const char* name, double value);  // null if it is not finite
  JsonObject& raw(const char* name, const std::string& json);
  std::string str() const { return "{" + fields_ + "}"; }

 private:
  std::string fields_;
};

}  // namespace flash_cute
