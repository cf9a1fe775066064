/* trace_writer.h - writes the blocks of a recording on a thread of its own. See trace_writer.c. */
#ifndef COLIBRI_TRACE_WRITER_H
#define COLIBRI_TRACE_WRITER_H
#include "trace.h"

#define CL_WRITER_BLOCKS 64u /* in memory: one is filled, the others wait for the drive */
#define CL_WHOLE_BLOCK_BYTES (sizeof(cl_block_header) + CL_BLOCK_BYTES)

typedef struct cl_trace_writer cl_trace_writer;

/* Makes the new file `path`, writes `head` into it and starts the thread. After an error there is no new file. */
int cl_trace_writer_open(cl_trace_writer **out, const char *path, const uint8_t *head, uint64_t bytes, cl_error *err);
/* The block to fill, CL_WHOLE_BLOCK_BYTES; the same until it is handed over. */
uint8_t *cl_trace_writer_block(cl_trace_writer *w);
/* Hands the first `bytes` of the block over, without waiting for the drive; without room for a next one it stops. */
void cl_trace_writer_put(cl_trace_writer *w, uint64_t bytes);
/* 1: it has stopped, and nothing that is handed over from now on is written. */
int cl_trace_writer_has_stopped(const cl_trace_writer *w);
/* CL_OK, or what has stopped it. */
int cl_trace_writer_state(cl_trace_writer *w, cl_error *err);
/* Waits until all is written, then writes the first `bytes` of the block at hand if nothing has stopped it, all of it to
 * the drive itself; frees. Returns what has stopped it. */
int cl_trace_writer_close(cl_trace_writer *w, uint64_t bytes, cl_error *err);

#endif
