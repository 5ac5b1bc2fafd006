// What errors say.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "heddle/error.h"

namespace heddle::kit {

// body() must throw a Thrown whose message holds `message`.
template <class Thrown = Error, class Body>
void expect_message(const Body& body, const std::string& message) {
  try {
    body();
    FAIL() << "nothing was thrown; expected " << message;
  } catch (const Thrown& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

}  // namespace heddle::kit
