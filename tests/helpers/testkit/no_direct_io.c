/* no_direct_io.c - a file system that refuses O_DIRECT for some files, for tests.
 *
 * Loaded with LD_PRELOAD. Opening a file whose path contains $NO_DIRECT_IO with O_DIRECT fails with EINVAL, as on file
 * systems that lack it; all other files open without O_DIRECT, so that it does not matter where the tests run.
 */
#define _GNU_SOURCE /* O_DIRECT, RTLD_NEXT */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

typedef int open_function(const char *, int, ...);

static int open_as(const char *name, const char *path, int flags, mode_t mode) {
    open_function *next;
    *(void **)&next = dlsym(RTLD_NEXT, name);
    const char *refused = getenv("NO_DIRECT_IO");
    if ((flags & O_DIRECT) && refused && strstr(path, refused)) {
        errno = EINVAL;
        return -1;
    }
    return next(path, flags & ~O_DIRECT, mode);
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return open_as("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return open_as("open64", path, flags, mode);
}
