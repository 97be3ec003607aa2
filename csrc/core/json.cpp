#include "core/json.h"

#include <cmath>
#include <locale>
#include <sstream>
#include <stdexcept>

namespace flash_cute {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw std::invalid_argument("flash_cute: " + message);
}

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  // Whether only blanks are left.
  bool at_end() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
    return at_ == text_.size();
  }

  // The next character that is no blank; 0 at the end.
  char peek() { return at_end() ? '\0' : text_[at_]; }

  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!take(c)) fail("expected '" + std::string(1, c) + "' at character " + std::to_string(at_) + " of " + text_);
  }

  std::string quoted() {
    expect('"');
    const size_t end = text_.find('"', at_);
    if (end == std::string::npos) fail("a string is not closed in " + text_);
    const std::string value = text_.substr(at_, end - at_);
    if (value.find('\\') != std::string::npos) fail("escapes in strings are not supported: " + value);
    at_ = end + 1;
    return value;
  }

  std::string value() {
    if (peek() == '"') return std::string("\"").append(quoted()).append("\"");
    const size_t end = text_.find_first_of(",} \n\t", at_);
    if (end == std::string::npos || end == at_) fail("expected a value at character " + std::to_string(at_));
    const std::string value = text_.substr(at_, end - at_);
    at_ = end;
    return value;
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

JsonFields::JsonFields(const std::string& text) {
  Reader in(text);
  in.expect('{');
  if (!in.take('}')) {
    do {
      const std::string name = in.quoted();
      in.expect(':');
      if (!fields_.emplace(name, in.value()).second) fail(name + " is given twice in " + text);
    } while (in.take(','));
    in.expect('}');
  }
  if (!in.at_end()) fail("expected the end after the object in " + text);
}

const std::string* JsonFields::find(const std::string& name) {
  known_ += name + "\n";
  const auto found = fields_.find(name);
  return found == fields_.end() ? nullptr : &found->second;
}

std::string JsonFields::text(const std::string& name, const std::string& otherwise) {
  const std::string* const value = find(name);
  if (value == nullptr) return otherwise;
  if (value->front() != '"') fail(name + " is " + *value + "; expected a string");
  return value->substr(1, value->size() - 2);
}

bool JsonFields::flag(const std::string& name) {
  const std::string* const value = find(name);
  if (value != nullptr && *value != "true" && *value != "false") fail(name + " is " + *value + "; expected a bool");
  return value != nullptr && *value == "true";
}

double JsonFields::number(const std::string& name, double otherwise) {
  const std::string* const value = find(name);
  if (value == nullptr) return otherwise;
  std::istringstream in(*value);
  in.imbue(std::locale::classic());
  double parsed = 0;
  if (!(in >> parsed) || !in.eof() || !std::isfinite(parsed)) fail(name + " is " + *value + "; expected a number");
  return parsed;
}

int64_t JsonFields::integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most) {
  const double value = number(name, static_cast<double>(otherwise));
  if (value != std::floor(value) || value < static_cast<double>(least) || value > static_cast<double>(most)) {
    const std::string given = has(name) ? fields_[name] : std::to_string(otherwise);
    fail(name + " is " + given + "; expected an integer in [" + std::to_string(least) + ", " + std::to_string(most) +
         "]");
  }
  return static_cast<int64_t>(value);
}

void JsonFields::end() const {
  const std::string known = "\n" + known_;
  for (const auto& [name, value] : fields_) {
    if (known.find("\n" + name + "\n") == std::string::npos) fail("unknown field " + name + "; supported:" + known);
  }
}

JsonObject& JsonObject::raw(const char* name, const std::string& json) {
  fields_ += (fields_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + json;
  return *this;
}

JsonObject& JsonObject::text(const char* name, const std::string& value) {
  std::string escaped;
  for (const char c : value) {
    if (c == '"' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return raw(name, "\"" + escaped + "\"");
}

JsonObject& JsonObject::number(const char* name, double value) {
  if (!std::isfinite(value)) return raw(name, "null");
  std::ostringstream digits;
  digits.imbue(std::locale::classic());
  digits.precision(9);
  digits << value;
  return raw(name, digits.str());
}

}  // namespace flash_cute
