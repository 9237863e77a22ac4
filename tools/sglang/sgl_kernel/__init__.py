"""Takes the place of SGLang's kernels in the test environment of SGLang (:mod:`tools.sglang`).

SGLang 0.5.23 imports these nine functions on every CPU, and calls them in speculative decoding only. It looks for all
other kernels and computes by PyTorch without them, so this module must not have them.
"""

__version__ = "0.0.0"


def _absent(name: str) -> object:
    def call(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"{name}: this environment has no kernels of SGLang")

    return call


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _absent("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
