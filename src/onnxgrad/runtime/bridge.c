/* What onnxruntime asks of a library of operators and Python cannot give: two symbols with addresses that stay. */

typedef void *(*hook_type)(void *options, const void *api_base);

static hook_type hook;

void onnxgrad_set_hook(hook_type given) { hook = given; }

/* Called by SessionOptions.register_custom_ops_library. */
void *RegisterCustomOps(void *options, const void *api_base) { return hook ? hook(options, api_base) : 0; }

/* Sessions may end after Python has: this only leaves a mark, and whoever makes the next kernel clears away. */
void onnxgrad_drop_kernel(void *kernel) { *(volatile long long *)kernel = 1; }
