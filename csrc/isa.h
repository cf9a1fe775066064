/* isa.h - what the kernel files share among themselves: the tables that a build may hold beside the generic one. */
#ifndef COLIBRI_ISA_H
#define COLIBRI_ISA_H
#include "kernels.h"

#if defined(__x86_64__)
extern const cl_kernels cl_kernels_avx2;
#endif

#endif
