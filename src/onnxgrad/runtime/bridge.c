/* What onnxruntime asks of a library of operators and Python cannot give: two symbols with addresses that stay; and
   what Python would take twenty calls for on CUDA: reading the inputs of a node, asking for its outputs. */
#include <stddef.h>

typedef void *(*hook_type)(void *options, const void *api_base);

static hook_type hook;

void onnxgrad_set_hook(hook_type given) { hook = given; }

/* Called by SessionOptions.register_custom_ops_library. */
void *RegisterCustomOps(void *options, const void *api_base) { return hook ? hook(options, api_base) : 0; }

/* Sessions may end after Python has: this only leaves a mark, and whoever makes the next kernel clears away. */
void onnxgrad_drop_kernel(void *kernel) { *(volatile long long *)kernel = 1; }

typedef void *(*get_input_type)(const void *context, size_t index, const void **value);
typedef void *(*get_output_type)(void *context, size_t index, const long long *dims, size_t rank, void **value);
typedef void *(*get_shape_type)(const void *value, int *kind, const long long **dims, size_t *rank);
typedef void *(*get_data_type)(void *value, void **data);
typedef void *(*get_stream_type)(const void *context, void **stream);

/* In the order that runtime/cuda.py has them; each gives a status, 0 if all is well. */
struct functions {
    get_input_type get_input;
    get_output_type get_output;
    get_shape_type get_shape;
    get_data_type get_data;
    get_stream_type get_stream;
};

/* Writes the stream and, for each input, its address, its rank (-1 if it is absent) and its dimensions; how many words
   that took, or -1 if there is no room. */
long long onnxgrad_read(const struct functions *ort, void *context, long long inputs, long long *words, long long room) {
    long long *at = words, *end = words + room;
    void *stream = 0;
    ort->get_stream(context, &stream);
    *at++ = (long long)stream;
    for (long long k = 0; k < inputs; k++) {
        const void *value = 0;
        const long long *dims = 0;
        size_t rank = 0;
        int kind = 0;
        void *data = 0;
        ort->get_input(context, (size_t)k, &value);
        if (value) {
            ort->get_shape(value, &kind, &dims, &rank);
            ort->get_data((void *)value, &data);
        }
        if (end - at < 2 + (long long)rank) return -1;
        *at++ = (long long)data;
        *at++ = value ? (long long)rank : -1;
        for (size_t d = 0; d < rank; d++) *at++ = dims[d];
    }
    return at - words;
}

/* Asks for outputs, given as index, rank and dimensions each; writes their addresses, 0 where there is none. */
void onnxgrad_ask(const struct functions *ort, void *context, long long outputs, const long long *asked, long long *addresses) {
    for (long long k = 0; k < outputs; k++) {
        long long index = *asked++, rank = *asked++;
        void *value = 0, *data = 0;
        ort->get_output(context, (size_t)index, asked, (size_t)rank, &value);
        if (value) ort->get_data(value, &data);
        addresses[k] = (long long)data;
        asked += rank;
    }
}
