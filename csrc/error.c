/* error.c - fills the caller-owned error struct. Knows no meaning of any code. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

int cl_fail(cl_error *err, int code, const char *format, ...) {
    if (err != NULL) {
        va_list arguments;
        va_start(arguments, format);
        err->code = code;
        (void)vsnprintf(err->text, sizeof err->text, format, arguments);
        va_end(arguments);
    }
    return code;
}

int cl_ok(cl_error *err) {
    if (err != NULL) {
        err->code = CL_OK;
        err->text[0] = '\0';
    }
    return CL_OK;
}
