/* expf.h - the constants of cl_expf and cl_sincosf (docs/numerics.md), shared by ops.c and the vector kernels. */
#ifndef COLIBRI_EXPF_H
#define COLIBRI_EXPF_H

/* Beyond these exp is 0 and infinity all the same. */
#define CL_EXP_LOW -105.0f
#define CL_EXP_HIGH 89.0f
#define CL_EXP_LOG2E 0x1.715476p0f
/* ln 2: the high part has 15 bits, so that its product with |n| <= 152 is exact. */
#define CL_EXP_LN2_HIGH 0x1.62e4p-1f
#define CL_EXP_LN2_LOW 0x1.7f7d1cp-20f
/* (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 */
#define CL_EXP_C2 0x1p-1f
#define CL_EXP_C3 0x1.555556p-3f
#define CL_EXP_C4 0x1.555556p-5f
#define CL_EXP_C5 0x1.111112p-7f
#define CL_EXP_C6 0x1.6c16c2p-10f
#define CL_EXP_C7 0x1.a01a02p-13f

#define CL_ANGLE_MAX 1e8

#endif
