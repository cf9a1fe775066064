/* version.c: the core's version string. */
#include "colibri.h"

const char *cl_version(void) { return "0.1.0"; }
