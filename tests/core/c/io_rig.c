/* io_rig.c - makes and reads what io_rig.h describes. */
#include "io_rig.h"
#include "check.h"
#include "format.h"
#include <unistd.h>

static uint8_t *record_of(const io_rig *rig, uint32_t record) {
    return rig->content + (uint64_t)record * RIG_RECORD_BYTES;
}

static uint64_t stripe_bytes(uint32_t number) {
    return CL_ALIGN + (uint64_t)RIG_RECORDS * (number ? RIG_SECOND_EXTENT : RIG_FIRST_EXTENT);
}

void rig_write_stripe(const io_rig *rig, const char *path, uint32_t number, uint32_t is_mirror, uint8_t uuid) {
    uint8_t block[CL_ALIGN] = {0};
    cl_stripe_header h = {.version = CL_FORMAT_VERSION, .stripe = number, .stripes = RIG_STRIPES};
    h.mirror = is_mirror;
    h.file_bytes = stripe_bytes(number);
    memcpy(h.magic, CL_STRIPE_MAGIC, sizeof h.magic);
    memset(h.uuid, uuid, sizeof h.uuid);
    h.header_crc32c = cl_crc32c(0, &h, offsetof(cl_stripe_header, header_crc32c));
    memcpy(block, &h, sizeof h);
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(block, 1, sizeof block, file) == sizeof block);
    for (uint32_t r = 0; r < RIG_RECORDS; r++) {
        const cl_extent *e = &rig->extents[r][number];
        CHECK(fwrite(record_of(rig, r) + e->record_offset, 1, e->bytes, file) == e->bytes);
    }
    CHECK(fclose(file) == 0);
}

void rig_write_mirrors(io_rig *rig) {
    for (uint32_t s = 0; s < RIG_STRIPES; s++) {
        rig_write_stripe(rig, rig->mirror_paths[s], s, 1, 7);
        rig->stripes[s].mirror_path = rig->mirror_paths[s];
    }
}

static void place_records(io_rig *rig) {
    for (uint32_t r = 0; r < RIG_RECORDS; r++) {
        uint64_t at = 0;
        for (uint32_t s = 0; s < RIG_STRIPES; s++) {
            uint64_t bytes = s ? RIG_SECOND_EXTENT : RIG_FIRST_EXTENT;
            rig->extents[r][s] = (cl_extent){s, cl_crc32c(0, record_of(rig, r) + at, bytes), CL_ALIGN + r * bytes, at,
                                             bytes};
            at += bytes;
        }
    }
}

void rig_make(io_rig *rig) {
    char folder[] = "/tmp/colibri-io-XXXXXX";
    uint64_t bytes = (uint64_t)RIG_RECORDS * RIG_RECORD_BYTES;
    memset(rig, 0, sizeof *rig);
    CHECK(mkdtemp(folder) != NULL);
    strcpy(rig->folder, folder);
    rig->content = malloc(bytes);
    rig->memory = aligned_alloc(CL_ALIGN, bytes);
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t word = test_random();
        memcpy(rig->content + i, &word, 8);
    }
    place_records(rig);
    for (uint32_t s = 0; s < RIG_STRIPES; s++) {
        snprintf(rig->paths[s], sizeof rig->paths[s], "%s/stripe%u", folder, s);
        snprintf(rig->mirror_paths[s], sizeof rig->mirror_paths[s], "%s/mirror%u", folder, s);
        rig_write_stripe(rig, rig->paths[s], s, 0, 7);
        rig->stripes[s] = (cl_stripe){rig->paths[s], stripe_bytes(s), NULL};
    }
    rig->options = (cl_io_options){.stripes = rig->stripes, .n_stripes = RIG_STRIPES};
}

void rig_remove(io_rig *rig) {
    rig_close(rig);
    for (uint32_t s = 0; s < RIG_STRIPES; s++) {
        unlink(rig->paths[s]);
        unlink(rig->mirror_paths[s]);
    }
    CHECK(rmdir(rig->folder) == 0);
    free(rig->content);
    free(rig->memory);
}

void rig_open(io_rig *rig, int32_t backend) {
    cl_error err = {0};
    memset(&rig->counters, 0, sizeof rig->counters);
    memset(rig->verified, 0, sizeof rig->verified);
    rig->options.backend = backend;
    int code = cl_io_open(&rig->io, &rig->options, &rig->counters, &err);
    if (!code) code = cl_io_start(rig->io, rig->memory, (uint64_t)RIG_RECORDS * RIG_RECORD_BYTES, &err);
    if (code) fprintf(stderr, "%s\n", err.text);
    CHECK(code == CL_OK);
    for (uint32_t r = 0; r < RIG_RECORDS; r++) {
        cl_read *read = &rig->reads[r];
        memset(read, 0, sizeof *read);
        read->data = rig->memory + (uint64_t)r * RIG_RECORD_BYTES;
        read->layer = 3;
        read->expert = r;
        read->tasks = rig->tasks[r];
        read->verified = rig->verified[r];
    }
}

void rig_close(io_rig *rig) {
    cl_io_close(rig->io);
    rig->io = NULL;
}

void rig_submit(io_rig *rig, uint32_t record, cl_priority priority) {
    memset(rig->reads[record].data, 0xee, RIG_RECORD_BYTES);
    cl_io_submit(rig->io, &rig->reads[record], rig->extents[record], RIG_STRIPES, priority);
}

int rig_wait(io_rig *rig, uint32_t record) {
    cl_read *read = &rig->reads[record];
    for (;;) {
        uint32_t seen = cl_io_events(rig->io);
        if (atomic_load(&read->pending) == 0) break;
        cl_io_wait(rig->io, seen, 1000000);
    }
    if (atomic_load(&read->failed)) return read->error.code;
    CHECK(memcmp(read->data, record_of(rig, record), RIG_RECORD_BYTES) == 0);
    return CL_OK;
}

int rig_read(io_rig *rig, uint32_t record) {
    rig_submit(rig, record, CL_READ_URGENT);
    return rig_wait(rig, record);
}

cl_drive_stats rig_stats(io_rig *rig, uint32_t stripe) {
    cl_drive_stats stats[RIG_STRIPES];
    CHECK(cl_io_stats(rig->io, stats, RIG_STRIPES) == RIG_STRIPES);
    return stats[stripe];
}
