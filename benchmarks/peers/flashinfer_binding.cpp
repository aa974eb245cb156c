// Exports the entry points of FlashInfer's topk.cu that are measured. Its own binding would need all of cub_topk.cu.
#include "tvm_ffi_utils.h"

using MaybeTensor = tvm::ffi::Optional<TensorView>;

void radix_topk_ragged_transform(TensorView, TensorView, TensorView, TensorView, MaybeTensor, int64_t, bool, int64_t, bool, MaybeTensor);
void radix_topk_page_table_transform(TensorView, TensorView, TensorView, MaybeTensor, TensorView, MaybeTensor, int64_t, bool, int64_t, int64_t, bool,
                                     MaybeTensor, MaybeTensor, MaybeTensor);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(radix_topk_ragged_transform, radix_topk_ragged_transform);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(radix_topk_page_table_transform, radix_topk_page_table_transform);
