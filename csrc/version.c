/* version.c: the core's version string. */
#include "colibri.h"

const char *colibri_version(void) { return "0.1.0"; }
