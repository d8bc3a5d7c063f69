#define INT4MOE_ROWS avx2
#include "isa/elementwise_rows.h"
