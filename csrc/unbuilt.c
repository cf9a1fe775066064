/* unbuilt.c: weak stand-ins while the core is being built, so that the module loads; each says so. Deleted when all are real. */
#include "colibri.h"
#include <stdio.h>
#include <string.h>
static int unbuilt(cl_error *err, const char *name) { if (err) { err->code = CL_UNSUPPORTED; snprintf(err->text, sizeof err->text, "%s is not built", name); } return CL_UNSUPPORTED; }
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define WEAK __attribute__((weak))
WEAK int cl_model_plan(const cl_model_options *options, cl_memory_plan *plan, cl_error *err) { return unbuilt(err, "cl_model_plan"); }
WEAK int cl_model_open(cl_model **out, const cl_model_options *options, cl_error *err) { return unbuilt(err, "cl_model_open"); }
WEAK int cl_model_load(cl_model *model, cl_error *err) { return unbuilt(err, "cl_model_load"); }
WEAK void cl_model_close(cl_model *model) {  }
WEAK void cl_model_get_stats(const cl_model *model, cl_model_stats *stats) {  }
WEAK const char * cl_model_isa(const cl_model *model) { return "unbuilt"; }
WEAK int cl_seq_create(cl_seq **out, cl_model *model, cl_error *err) { return unbuilt(err, "cl_seq_create"); }
WEAK void cl_seq_free(cl_seq *seq) {  }
WEAK uint64_t cl_seq_length(const cl_seq *seq) { return 0; }
WEAK void cl_seq_cancel(cl_seq *seq) {  }
WEAK uint32_t cl_kv_layout(const cl_model *model, cl_kv_section *sections, uint32_t capacity) { return 0; }
WEAK int cl_seq_export_page(const cl_seq *seq, uint64_t page_index, uint8_t *out, uint64_t out_bytes, cl_error *err) { return unbuilt(err, "cl_seq_export_page"); }
WEAK int cl_seq_import_page(cl_seq *seq, const uint8_t *data, uint64_t data_bytes, uint32_t positions, cl_error *err) { return unbuilt(err, "cl_seq_import_page"); }
WEAK int cl_prefill_create(cl_prefill **out, cl_seq *seq, const int32_t *tokens, uint32_t n, const cl_sampling *sampling, float *all_logits, cl_error *err) { return unbuilt(err, "cl_prefill_create"); }
WEAK void cl_prefill_free(cl_prefill *prefill) {  }
WEAK int cl_step(cl_model *model, cl_row *rows, uint32_t n_rows, cl_cursor *cursors, uint32_t n_cursors, uint64_t budget_us, cl_error *err) { return unbuilt(err, "cl_step"); }
