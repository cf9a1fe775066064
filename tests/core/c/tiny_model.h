/* tiny_model.h - a small random model on disk and its cl_model_options, for C tests of the engine.
 *
 * One dense and two MoE layers (shared expert with output gate, select bias, q/k norm), odd sizes, two stripes; every
 * expert record is cut into three extents. Files lie in a folder of their own, which tiny_remove deletes.
 */
#ifndef COLIBRI_TINY_MODEL_H
#define COLIBRI_TINY_MODEL_H
#include "colibri.h"

typedef struct tiny_model {
    char folder[64];
    char dense_path[96], stripe_paths[2][96];
    cl_spec spec;
    cl_layer_spec layers[3];
    cl_rope_spec rope;
    float inv_freq[3];
    cl_dense_tensor dense[64];
    cl_expert_layer experts[2];
    cl_extent *extents[2];
    cl_stripe stripes[2];
    cl_model_options options;
} tiny_model;

#define TINY_VOCAB 37
#define TINY_EXPERTS 5
#define TINY_TOP_K 2

/* `dense` and `expert` are the weights' formats. Options: everything resident, f16 KV, one thread, pread without
 * O_DIRECT. */
void tiny_make(tiny_model *t, cl_format dense, cl_format expert);
void tiny_remove(tiny_model *t);

#endif
