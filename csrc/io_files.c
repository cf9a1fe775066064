/* io_files.c - the files of a drive: a stripe and, where there is one, its mirror.
 *
 * Owns opening them, the checks of header and length that tie them to the container, the choice of a descriptor for a
 * request, and reopening while the model lives. A stripe that does not fit fails the open; a mirror that does not is a
 * note, because the model runs without it. Refuses to interpret anything after the header.
 */
#define _GNU_SOURCE /* O_DIRECT, statx */
#include "error.h"
#include "io_drive.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_BYTES_PER_CALL (1u << 30) /* Linux transfers at most 2 GiB - 4 KiB per call */
#define MIRROR_MARK 1u                 /* cl_stripe_header.mirror of a mirror */

int cl_pread_all(int fd, void *data, uint64_t bytes, uint64_t offset, uint64_t *done) {
    int retried = 0;
    *done = 0;
    while (*done < bytes) {
        uint64_t left = bytes - *done;
        ssize_t got = pread(fd, (uint8_t *)data + *done, left < MOST_BYTES_PER_CALL ? left : MOST_BYTES_PER_CALL,
                            (off_t)(offset + *done));
        if (got == 0) return ENODATA;
        if (got > 0) *done += (uint64_t)got;
        else if (errno == EIO && !retried) retried = 1;
        else if (errno != EINTR) return errno;
    }
    return 0;
}

/* A file while it is being opened: the stripe, or its mirror. */
typedef struct opening {
    const cl_drive *d;
    cl_file *file;
    const char *what; /* "stripe" or "mirror of stripe" */
    uint32_t mark;    /* least header.mirror: a mirror may stand in for a lost stripe, not the other way round */
    cl_error *err;
} opening;

static int refuse(const opening *o, int code, const char *why) {
    return cl_fail(o->err, code, "%s %u (%s): %s", o->what, o->d->stripe, o->file->path, why);
}

static int check_header(const opening *o, const cl_stripe_header *h, uint64_t file_bytes) {
    const cl_io *io = o->d->io;
    uint32_t stripe = o->d->stripe;
    if (memcmp(h->magic, CL_STRIPE_MAGIC, sizeof h->magic) != 0)
        return refuse(o, CL_CORRUPT, "not a stripe file: magic bytes are missing at offset 0");
    if (cl_crc32c(0, h, offsetof(cl_stripe_header, header_crc32c)) != h->header_crc32c)
        return refuse(o, CL_CORRUPT, "the header at offset 0 fails its checksum");
    if (h->version != CL_FORMAT_VERSION)
        return cl_fail(o->err, CL_UNSUPPORTED, "%s %u (%s): format version %u, this build reads %d", o->what, stripe,
                       o->file->path, h->version, CL_FORMAT_VERSION);
    if (h->stripe != stripe || h->stripes != io->n_drives)
        return cl_fail(o->err, CL_CORRUPT, "%s %u (%s): the file is stripe %u of %u, expected %u of %u", o->what,
                       stripe, o->file->path, h->stripe, h->stripes, stripe, io->n_drives);
    if (h->mirror > MIRROR_MARK) return refuse(o, CL_CORRUPT, "its header's mirror field is neither 0 nor 1");
    if (h->mirror < o->mark) return refuse(o, CL_CORRUPT, "the file is a stripe, not a mirror");
    if (io->first.version && memcmp(h->uuid, io->first.uuid, sizeof h->uuid) != 0)
        return refuse(o, CL_CORRUPT, "belongs to another pack than stripe 0 (UUIDs differ)");
    if (h->file_bytes > file_bytes)
        return cl_fail(o->err, CL_CORRUPT, "%s %u (%s): the file has %llu bytes, its header says %llu", o->what,
                       stripe, o->file->path, (unsigned long long)file_bytes, (unsigned long long)h->file_bytes);
    return CL_OK;
}

static int read_header(const opening *o, int fd, cl_stripe_header *header) {
    uint8_t block[2 * CL_ALIGN];
    uint8_t *aligned = (uint8_t *)(((uintptr_t)block + CL_ALIGN - 1) & ~(uintptr_t)(CL_ALIGN - 1));
    uint64_t done;
    int failed = cl_pread_all(fd, aligned, CL_ALIGN, 0, &done);
    if (failed == ENODATA)
        return cl_fail(o->err, CL_CORRUPT, "%s %u (%s): the file ends at offset %llu, inside its header", o->what,
                       o->d->stripe, o->file->path, (unsigned long long)done);
    if (failed)
        return cl_fail(o->err, CL_IO, "%s %u (%s): reading the header at offset 0 failed: %s (errno %d)", o->what,
                       o->d->stripe, o->file->path, strerror(failed), failed);
    memcpy(header, aligned, sizeof *header);
    return CL_OK;
}

/* Why O_DIRECT reads at multiples of CL_ALIGN cannot work on this file, or NULL. On success direct_fd is open. */
static const char *open_direct(const opening *o) {
    int fd = open(o->file->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0) return strerror(errno);
    const char *why = NULL;
#ifdef STATX_DIOALIGN
    struct statx s;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) == 0 && (s.stx_mask & STATX_DIOALIGN)) {
        if (s.stx_dio_offset_align == 0) why = "the file system does not support it for this file";
        else if (s.stx_dio_offset_align > CL_ALIGN || s.stx_dio_mem_align > CL_ALIGN)
            why = "the file system asks for an alignment above 4096 bytes";
    }
#endif
    cl_stripe_header header;
    opening probe = *o;
    probe.err = NULL;
    if (!why && read_header(&probe, fd, &header) == CL_IO) why = "a first read was refused";
    if (why) close(fd);
    else o->file->direct_fd = fd;
    return why;
}

static int check_file(const opening *o) {
    cl_stripe_header header;
    cl_file *file = o->file;
    struct stat s;
    if (fstat(file->buffered_fd, &s) != 0 || !S_ISREG(s.st_mode)) return refuse(o, CL_IO, "not a regular file");
    file->device = s.st_dev;
    file->inode = s.st_ino;
    if ((uint64_t)s.st_size < o->d->least_bytes)
        return cl_fail(o->err, CL_CORRUPT, "%s %u (%s): the file has %llu bytes, the container needs %llu", o->what,
                       o->d->stripe, file->path, (unsigned long long)s.st_size,
                       (unsigned long long)o->d->least_bytes);
    if (o->d->io->bare) return CL_OK;
    int code = read_header(o, file->buffered_fd, &header);
    if (!code) code = check_header(o, &header, (uint64_t)s.st_size);
    if (!code && !o->d->io->first.version) o->d->io->first = header; /* stripe 0 is opened first */
    return code;
}

static void close_file(cl_file *file) {
    if (file->direct_fd >= 0) close(file->direct_fd);
    if (file->buffered_fd >= 0) close(file->buffered_fd);
    file->direct_fd = file->buffered_fd = -1;
}

/* Opens o->file, whose path is set. On failure nothing is open. */
static int open_file(const opening *o) {
    cl_file *file = o->file;
    file->direct_fd = -1;
    file->buffered_fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->buffered_fd < 0)
        return cl_fail(o->err, CL_IO, "%s %u (%s): open failed: %s (errno %d)", o->what, o->d->stripe, file->path,
                       strerror(errno), errno);
    int code = check_file(o);
    if (!code && o->d->io->direct != CL_DIRECT_OFF) {
        const char *why = open_direct(o);
        if (why && o->d->io->direct == CL_DIRECT_ON)
            code = cl_fail(o->err, CL_UNSUPPORTED, "%s %u (%s): O_DIRECT was asked for and does not work: %s", o->what,
                           o->d->stripe, file->path, why);
    }
    if (code) close_file(file);
    return code;
}

static int open_stripe(const cl_drive *d, cl_file *file, cl_error *err) {
    return open_file(&(opening){d, file, "stripe", 0, err});
}

static int open_mirror(const cl_drive *d, cl_file *file, cl_error *err) {
    return open_file(&(opening){d, file, "mirror of stripe", MIRROR_MARK, err});
}

int cl_files_open(cl_drive *d, const cl_stripe *stripe, cl_error *err) {
    cl_error mirror_error = {0};
    d->least_bytes = stripe->bytes;
    d->file.path = strdup(stripe->path);
    if (stripe->mirror_path) d->mirror.path = strdup(stripe->mirror_path);
    if (!d->file.path || (stripe->mirror_path && !d->mirror.path))
        return cl_fail(err, CL_NOMEM, "no memory for the path of stripe %u", d->stripe);
    int code = open_stripe(d, &d->file, err);
    if (code) return code;
    if (d->mirror.path && open_mirror(d, &d->mirror, &mirror_error))
        cl_drive_note(d, CL_NOTE_MIRROR, "%s", mirror_error.text);
    return CL_OK;
}

void cl_files_close(cl_drive *d) {
    close_file(&d->file);
    close_file(&d->mirror);
    free(d->file.path);
    free(d->mirror.path);
}

/* ---- reopening ---- */

static int needs_reopening(const cl_drive *d, const cl_file *file) {
    struct stat s;
    if (!file->path) return 0;
    return d->degraded || file->buffered_fd < 0 || stat(file->path, &s) != 0 || s.st_dev != file->device ||
           s.st_ino != file->inode;
}

/* Puts `fresh` in the place of `file` once nothing is being read; the mutex is held. */
static void replace_file(cl_drive *d, cl_file *file, const cl_file *fresh) {
    d->paused = 1;
    while (d->in_flight) pthread_cond_wait(&d->idle, &d->mutex);
    close_file(file);
    *file = *fresh;
    d->replacements++;
    d->backend->files_changed(d);
    d->paused = 0;
    d->backend->wake(d, d->depth);
}

int cl_files_reopen(cl_drive *d, cl_error *err) {
    cl_error mirror_error = {0};
    cl_file stripe = d->file, mirror = d->mirror;
    pthread_mutex_lock(&d->mutex);
    int stripe_wanted = needs_reopening(d, &d->file), mirror_wanted = needs_reopening(d, &d->mirror);
    pthread_mutex_unlock(&d->mutex);
    int code = stripe_wanted ? open_stripe(d, &stripe, err) : CL_OK;
    int mirror_code = mirror_wanted ? open_mirror(d, &mirror, &mirror_error) : CL_OK;
    pthread_mutex_lock(&d->mutex);
    if (stripe_wanted && !code) {
        replace_file(d, &d->file, &stripe);
        d->degraded = 0;
        d->last_error[0] = '\0';
    }
    if (mirror_wanted && !mirror_code) replace_file(d, &d->mirror, &mirror);
    if (mirror_wanted) cl_drive_note(d, CL_NOTE_MIRROR, "%s", mirror_error.text);
    pthread_mutex_unlock(&d->mutex);
    return code;
}

/* ---- descriptors ---- */

int cl_files_fd(const cl_drive *d, int number) {
    const cl_file *file = number >= CL_MIRROR_DIRECT ? &d->mirror : &d->file;
    return number == CL_STRIPE_DIRECT || number == CL_MIRROR_DIRECT ? file->direct_fd : file->buffered_fd;
}

int cl_files_choose(const cl_drive *d, const cl_request *r) {
    int mirror = r->task->attempt == CL_TRY_MIRROR;
    const cl_file *file = mirror ? &d->mirror : &d->file;
    uint64_t bits = (uintptr_t)(r->data + r->done) | (r->bytes - r->done) | (r->offset + r->done);
    int direct = file->direct_fd >= 0 && (bits & (CL_ALIGN - 1)) == 0;
    if (mirror) return direct ? CL_MIRROR_DIRECT : CL_MIRROR_BUFFERED;
    return direct ? CL_STRIPE_DIRECT : CL_STRIPE_BUFFERED;
}
