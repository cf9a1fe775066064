/* reader.c - reads any range of one file, past the page cache where that works.
 *
 * Owns two descriptors and an aligned buffer. dense.safetensors is as large as memory allows and read once, front to
 * back; through the page cache that would cost several times the processor time and push out what is worth keeping.
 * Its tensors lie at odd offsets, so O_DIRECT reads whole blocks into the buffer and the wanted bytes are copied out.
 * Whatever O_DIRECT refuses is read through the other descriptor. Refuses nothing itself; who checks the bytes is the
 * caller.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include "reader.h"
#include "error.h"
#include "format.h"
#include "io.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BOUNCE_BYTES (4u << 20)

static void open_direct(cl_reader *r) {
    uint64_t done;
    r->direct_fd = open(r->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (r->direct_fd < 0) return;
    int failed = cl_pread_all(r->direct_fd, r->bounce, CL_ALIGN, 0, &done);
    if (failed == 0 || failed == ENODATA) return;
    close(r->direct_fd);
    r->direct_fd = -1;
}

int cl_reader_open(cl_reader *r, const char *path, int32_t direct, cl_error *err) {
    void *bounce = NULL;
    *r = (cl_reader){path, -1, open(path, O_RDONLY | O_CLOEXEC), NULL};
    if (r->buffered_fd < 0) return cl_fail(err, CL_IO, "%s: open failed: %s (errno %d)", path, strerror(errno), errno);
    if (direct == CL_DIRECT_OFF) return CL_OK;
    if (posix_memalign(&bounce, CL_ALIGN, BOUNCE_BYTES) != 0) {
        cl_reader_close(r);
        return cl_fail(err, CL_NOMEM, "%s: no memory to read it", path);
    }
    r->bounce = bounce;
    open_direct(r);
    if (r->direct_fd >= 0 || direct == CL_DIRECT_AUTO) return CL_OK;
    cl_reader_close(r);
    return cl_fail(err, CL_UNSUPPORTED, "%s: O_DIRECT was asked for and does not work", path);
}

void cl_reader_close(cl_reader *r) {
    if (r->direct_fd >= 0) close(r->direct_fd);
    if (r->buffered_fd >= 0) {
        /* What was read is in the arena now; a second copy in the page cache helps nobody. */
        posix_fadvise(r->buffered_fd, 0, 0, POSIX_FADV_DONTNEED);
        close(r->buffered_fd);
    }
    free(r->bounce);
    *r = (cl_reader){NULL, -1, -1, NULL};
}

/* Some of the wanted bytes through the bounce buffer: how many, 0 if O_DIRECT gives none of them. */
static uint64_t read_blocks(cl_reader *r, uint8_t *data, uint64_t bytes, uint64_t offset) {
    uint64_t start = offset & ~(uint64_t)(CL_ALIGN - 1), skip = offset - start;
    uint64_t window = (skip + bytes + CL_ALIGN - 1) & ~(uint64_t)(CL_ALIGN - 1);
    if (window > BOUNCE_BYTES) window = BOUNCE_BYTES;
    ssize_t got;
    do got = pread(r->direct_fd, r->bounce, window, (off_t)start);
    while (got < 0 && errno == EINTR);
    if (got < 0 || (uint64_t)got <= skip) return 0;
    uint64_t usable = (uint64_t)got - skip;
    if (usable > bytes) usable = bytes;
    memcpy(data, r->bounce + skip, usable);
    return usable;
}

int cl_reader_read(cl_reader *r, void *data, uint64_t bytes, uint64_t offset, uint64_t *done) {
    *done = 0;
    while (r->direct_fd >= 0 && *done < bytes) {
        uint64_t got = read_blocks(r, (uint8_t *)data + *done, bytes - *done, offset + *done);
        if (got == 0) break; /* the end, or an error: the other descriptor tells which, and tries again */
        *done += got;
    }
    if (*done == bytes) return 0;
    uint64_t rest = 0;
    int failed = cl_pread_all(r->buffered_fd, (uint8_t *)data + *done, bytes - *done, offset + *done, &rest);
    *done += rest;
    return failed;
}
