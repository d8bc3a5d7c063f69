// W4A8 on AVX-VNNI, for client CPUs without AVX-512: the AVX2 row, with one instruction for four products and their sum.
// Sums are exact in both, so the bits are the same.
#define INT4MOE_AVX_VNNI 1
#include "isa/avx2_w4a8.cpp"
