#include "core/json.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <locale>
#include <stdexcept>
#include <string>

using namespace flash_cute;

TEST_CASE("fields have values of their kinds") {
  JsonFields in(R"( {"op": "bwd", "causal":true,"full" : false, "scale": -2.5e-1, "batch": 7, "empty": ""} )");
  CHECK(in.text("op", "fwd") == "bwd");
  CHECK(in.text("empty", "fwd") == "");
  CHECK(in.flag("causal"));
  CHECK_FALSE(in.flag("full"));
  CHECK(in.number("scale", 1) == -0.25);
  CHECK(in.integer("batch", 1, 0, 7) == 7);
  CHECK_NOTHROW(in.end());
}

TEST_CASE("fields that are not there have the default") {
  JsonFields in("{}");
  CHECK_FALSE(in.has("op"));
  CHECK(in.text("op", "fwd") == "fwd");
  CHECK_FALSE(in.flag("causal"));
  CHECK(in.number("scale", 0.5) == 0.5);
  CHECK(in.integer("batch", 3, 0, 9) == 3);
  CHECK_NOTHROW(in.end());
}

TEST_CASE("values of other kinds are refused by the name of the field") {
  JsonFields in(R"({"a": 1.5, "b": "text", "c": true, "d": 9, "e": nan, "f": 12x, "g": 0x1, "h": 1e999})");
  auto refuses = [](const auto& call, const char* message) { CHECK_THROWS_WITH(call(), doctest::Contains(message)); };
  refuses([&] { in.text("a", ""); }, "a is 1.5; expected a string");
  refuses([&] { in.flag("b"); }, "b is \"text\"; expected a bool");
  refuses([&] { in.number("c", 0); }, "c is true; expected a number");
  refuses([&] { in.integer("a", 0, 0, 9); }, "a is 1.5; expected an integer in [0, 9]");
  refuses([&] { in.integer("d", 0, 0, 8); }, "d is 9; expected an integer in [0, 8]");
  refuses([&] { in.integer("d", 0, 10, 11); }, "d is 9; expected an integer in [10, 11]");
  refuses([&] { in.number("e", 0); }, "e is nan; expected a number");
  refuses([&] { in.number("f", 0); }, "f is 12x; expected a number");
  refuses([&] { in.number("g", 0); }, "g is 0x1; expected a number");
  refuses([&] { in.number("h", 0); }, "h is 1e999; expected a number");
  refuses([&] { in.integer("none", 0, 1, 9); }, "none is 0; expected an integer in [1, 9]");
}

TEST_CASE("fields that are never read are refused") {
  JsonFields in(R"({"batch": 1, "bat": 2})");
  in.integer("batch", 1, 0, 9);
  CHECK_THROWS_WITH(in.end(), doctest::Contains("unknown field bat; supported:\nbatch"));
}

TEST_CASE("what is no flat object is refused") {
  for (const char* text : {"", "[]", "{", "{\"a\"}", "{\"a\": }", "{\"a\": 1", "{\"a\": 1} 2", "{\"a\": \"1}", "{a: 1}",
                           "{\"a\": \"\\n\"}", "{\"a\": 1 \"b\": 2}", "{\"a\": 1,}", "{,}", "{\"a\": 1, \"a\": 1}"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(JsonFields{text}, std::invalid_argument);
  }
}

TEST_CASE("an object is written as it is read") {
  JsonObject out;
  CHECK(out.str() == "{}");
  out.text("op", "fwd").flag("causal", true).integer("batch", -(int64_t{1} << 53)).number("scale", 0.125);
  JsonFields in(out.str());
  CHECK(in.text("op", "") == "fwd");
  CHECK(in.flag("causal"));
  CHECK(in.number("batch", 0) == -9007199254740992.0);
  CHECK(in.number("scale", 0) == 0.125);
  CHECK_NOTHROW(in.end());
}

TEST_CASE("JSON has no infinity, and quotes are escaped") {
  JsonObject out;
  out.number("cost", std::numeric_limits<double>::infinity()).text("why", R"(a "b" \ c)").raw("list", "[1]");
  CHECK(out.str() == R"({"cost": null, "why": "a \"b\" \\ c", "list": [1]})");
}

TEST_CASE("numbers have a decimal point, whatever the locale is") {
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Comma));
  JsonObject out;
  out.number("scale", 1234.5).integer("batch", 123456);
  JsonFields in(out.str());
  const double scale = in.number("scale", 0), batch = in.number("batch", 0);
  std::locale::global(before);
  CHECK(out.str() == R"({"scale": 1234.5, "batch": 123456})");
  CHECK(scale == 1234.5);
  CHECK(batch == 123456);
}
