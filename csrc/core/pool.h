// Threads of our own, which wait for the next region spinning for a while before they sleep.
#pragma once

#include "core/threads.h"

namespace int4moe {

// Runs fn on exactly `threads` threads, this one among them. One region at a time in the process: a second caller waits.
void pool_parallel(int threads, TeamFunction fn, void* arg);

}  // namespace int4moe
