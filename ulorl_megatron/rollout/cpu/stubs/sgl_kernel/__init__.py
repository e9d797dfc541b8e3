"""Stand-in for sgl-kernel where there is no GPU (PyPI has no CPU build of it).

Without AMX kernels SGLang's CPU engine computes every layer in plain torch and imports only a few names from
here. One of them is called when decoding; the others belong to speculative decoding.
"""

from torch import Tensor

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """For each request r: req_to_token[r, start:end] = the next end - start entries of out_cache_loc."""
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in spans:
        count = end - start
        req_to_token[request, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def _absent(name: str):
    def call(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} (speculative decoding) does not exist on a CPU")

    return call


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
