#define INT4MOE_ROWS scalar
#include "isa/elementwise_rows.h"
