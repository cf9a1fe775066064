/* io_rig.h - two stripe files with mirrors, records that lie on both, and an I/O engine over them, for tests. */
#ifndef COLIBRI_IO_RIG_H
#define COLIBRI_IO_RIG_H
#include "io.h"

#define RIG_STRIPES 2
#define RIG_RECORDS 10
#define RIG_FIRST_EXTENT ((2u << 20) + 4096) /* of each record, on stripe 0: several requests */
#define RIG_SECOND_EXTENT (16u << 10)        /* on stripe 1: one request */
#define RIG_RECORD_BYTES (RIG_FIRST_EXTENT + RIG_SECOND_EXTENT)

typedef struct io_rig {
    char folder[64];
    char paths[RIG_STRIPES][96], mirror_paths[RIG_STRIPES][96];
    cl_stripe stripes[RIG_STRIPES]; /* without mirrors; a test adds their paths */
    uint8_t *content;               /* [RIG_RECORDS][RIG_RECORD_BYTES], what must be read */
    cl_extent extents[RIG_RECORDS][RIG_STRIPES];
    /* the engine */
    cl_io_options options; /* threads or io_uring, O_DIRECT where it works, verify always */
    cl_io *io;
    cl_counters counters;
    uint8_t *memory; /* as `content` */
    cl_read reads[RIG_RECORDS];
    cl_task tasks[RIG_RECORDS][RIG_STRIPES];
    uint8_t verified[RIG_RECORDS][RIG_STRIPES];
} io_rig;

void rig_make(io_rig *rig);
void rig_remove(io_rig *rig);
/* Writes the stripe `number` (or a mirror of it) of a pack with this UUID byte to `path`. */
void rig_write_stripe(const io_rig *rig, const char *path, uint32_t number, uint32_t is_mirror, uint8_t uuid);
void rig_write_mirrors(io_rig *rig);

/* Opens and starts the engine with rig->options; must work. */
void rig_open(io_rig *rig, int32_t backend);
void rig_close(io_rig *rig);
void rig_submit(io_rig *rig, uint32_t record, cl_priority priority);
/* Waits until a record is complete; its error code. On success its bytes are compared. */
int rig_wait(io_rig *rig, uint32_t record);
/* Both. */
int rig_read(io_rig *rig, uint32_t record);
cl_drive_stats rig_stats(io_rig *rig, uint32_t stripe);

#endif
