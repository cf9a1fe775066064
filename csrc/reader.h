/* reader.h - reads any range of one file. See reader.c. */
#ifndef COLIBRI_READER_H
#define COLIBRI_READER_H
#include "colibri.h"

typedef struct cl_reader {
    const char *path; /* borrowed */
    int direct_fd;    /* -1: not used */
    int buffered_fd;
    uint8_t *bounce; /* where O_DIRECT reads land */
} cl_reader;

/* Opens for CL_DIRECT_*. CL_IO, CL_NOMEM, or CL_UNSUPPORTED where O_DIRECT is a must and does not work. */
int cl_reader_open(cl_reader *reader, const char *path, int32_t direct, cl_error *err);
void cl_reader_close(cl_reader *reader);
/* 0, or an errno; ENODATA at the file's end. *done tells how many bytes were read. */
int cl_reader_read(cl_reader *reader, void *data, uint64_t bytes, uint64_t offset, uint64_t *done);

#endif
