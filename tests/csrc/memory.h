// Calls while there is no memory.
#pragma once

#include <functional>

namespace tests {

// `call` as on a machine whose n-th allocation and all later ones fail, for every n until there are enough: it has to throw
// std::bad_alloc, and afterwards `call` with memory has to make `right` true. Scratch memory and the thread that calls are
// fresh each time, so that nothing is kept from an earlier one.
void test_without_memory(const char* name, const std::function<void()>& call, const std::function<bool()>& right);

}  // namespace tests
