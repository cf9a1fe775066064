/* error.h - how the core fills a caller's cl_error. Used by every C file that can fail; owns no state. */
#ifndef COLIBRI_ERROR_H
#define COLIBRI_ERROR_H
#include "colibri.h"

/* Fills err (may be NULL) and returns code, so that a failing function can end with `return cl_fail(...)`. */
int cl_fail(cl_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Fills err with CL_OK and an empty text; returns CL_OK. */
int cl_ok(cl_error *err);

#endif
