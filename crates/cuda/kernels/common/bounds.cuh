// Threads of a block, where the assembler is to use as many registers as it likes. For compute capability 10 it holds itself
// to a round number of them and spills a few bytes unless it is told that one block of a multiprocessor is enough.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define THREADS_OF_BLOCK(threads) __launch_bounds__(threads, 1)
#else
#define THREADS_OF_BLOCK(threads) __launch_bounds__(threads)
#endif
