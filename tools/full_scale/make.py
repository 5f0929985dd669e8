"""Skeletons of the full-scale model: right names, shapes, types, sizes and headers, no data.

    python3 tools/full_scale/make.py official|exllamav3|vllm|tensorfold FOLDER

Writes the official checkpoint (48 shards, 96,085 tensors, 510,286,023,000 bytes) or a pack as public ones are: exllamav3 at 2.9, vllm at 2.7,
tensorfold at 2.8 bits per weight, without the Engram tables. Files are sparse: a skeleton takes some megabytes of disk (the file system must
know sparse files) and every weight in it is zero. For planning, inspection and load tests of the real shape. Standard library only; written
from the published tables (shapes, shard contents, widths), not from this program's own lists, so that the two can be held against each other.
"""
import argparse
import json
import os
import pathlib
import random
import struct

D, VOCAB, LAYERS, EXPERTS, WIDTH = 5120, 129280, 40, 384, 2304
STAGES, DRAFT_EXPERTS = 3, 128
KV_SOURCES, INDEX_SOURCES, RATIO_TWO = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), (2, 8, 14)
ENGRAM_ROWS = {1: 384006168, 14: 384016682}
SIZES = {"I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}
MUL1 = 0x83DCD12D


def config():
    text = {
        "model_type": "deepseek_v41_text", "vocab_size": VOCAB, "hidden_size": D, "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
        "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": False, "max_position_embeddings": 1048576, "rope_theta": 10000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
        "compress_rope_theta": 160000, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": list(KV_SOURCES),
        "index_source_layer_ids": list(INDEX_SOURCES), "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "engram_layer_ids": sorted(ENGRAM_ROWS), "engram_num_embeddings": [ENGRAM_ROWS[k] for k in sorted(ENGRAM_ROWS)],
        "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": STAGES, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": DRAFT_EXPERTS,
        "dspark_num_experts_per_tok": 3}
    vision = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16,
              "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 1024,
              "min_pixels": 295936, "max_wh_ratio": None}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "transformers_version": "5.6.0",
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264, "quantization_config": fp8, "text_config": text,
            "vision_config": vision}


# ---- Modules. A native tensor is (name, dtype, shape); a matrix is (stem, in, out, stored form), which a pack may replace.

def fp8(stem, out, width):
    return [(stem + ".weight", "F8_E4M3", [out, width]), (stem + ".scale", "F8_E8M0", [-(-out // 32), -(-width // 32)])]


def fp4(stem, out, width):
    return [(stem + ".weight", "I8", [out, width // 2]), (stem + ".scale", "F8_E8M0", [out, width // 32])]


def bf16(stem, out, width):
    return [(stem + ".weight", "BF16", [out, width])]


def block_matrices(p, n_experts, layer):
    """(stem, in, out, native form, kind) of a backbone layer, or of a drafter stage (layer None)."""
    out = [(p + "attn.wq_a", D, 1280, fp8, "wq_a"), (p + "attn.wq_b", 1280, 32768, fp8, "wq_b"), (p + "attn.wkv", D, 512, fp8, "wkv"),
           (p + "attn.wo_a", 4096, 8192, fp8, "wo_a"), (p + "attn.wo_b", 8192, D, fp8, "wo_b")]
    if layer in KV_SOURCES:
        out += [(p + "attn.compressor.wkv", D, 512, bf16, "compressor"), (p + "attn.indexer.wk", 512, 128, bf16, "wk")]
    if layer in RATIO_TWO:
        out += [(p + "attn.compressor.wgate", D, 512, bf16, "compressor")]
    if layer in INDEX_SOURCES:
        out += [(p + "attn.indexer.wq_b", 1280, 4096, fp8, "indexer")]
    if layer in ENGRAM_ROWS:
        out += [(p + "engram.wkv", 6144, 25600, fp8, "engram")]
    for e in range(n_experts):
        for w, i, o in (("w1", D, WIDTH), ("w2", WIDTH, D), ("w3", D, WIDTH)):
            out.append((f"{p}ffn.experts.{e}.{w}", i, o, fp4, "expert"))
    for w, i, o in (("w1", D, WIDTH), ("w2", WIDTH, D), ("w3", D, WIDTH)):
        out.append((f"{p}ffn.shared_experts.{w}", i, o, fp8, "shared"))
    return out


def block_plain(p, n_experts, layer):
    out = [(p + "attn_norm.weight", "BF16", [D]), (p + "ffn_norm.weight", "BF16", [D]), (p + "attn.attn_sink", "F32", [64]),
           (p + "attn.q_norm.weight", "BF16", [1280]), (p + "attn.kv_norm.weight", "BF16", [512]),
           (p + "ffn.gate.weight", "BF16", [n_experts, D]), (p + "ffn.gate.bias", "F32", [n_experts]), (p + "ffn.gate.bias_vl", "F32", [n_experts])]
    for site in ("attn", "ffn"):
        out += [(f"{p}hc_{site}_fn", "F32", [24, 4 * D]), (f"{p}hc_{site}_base", "F32", [24]), (f"{p}hc_{site}_scale", "F32", [3])]
    if layer in KV_SOURCES:
        out += [(p + "attn.compressor.norm.weight", "BF16", [512]), (p + "attn.indexer.k_norm.weight", "BF16", [128])]
    if layer in INDEX_SOURCES:
        out += [(p + "attn.indexer.weights_proj.weight", "BF16", [32, D])]
    return out


def engram(layer):
    p, rows = f"layers.{layer}.engram.", ENGRAM_ROWS[layer]
    gates = [(p + "q_weight", "BF16", [4, D]), (p + "k_weight", "BF16", [4, D])]
    return [(p + "embed.weight", "F8_E4M3", [rows, 256]), (p + "embed.scale", "F8_E8M0", [rows, 8])], gates


def drafter_plain():
    return {0: [("mtp.0.main_norm.weight", "BF16", [D])], 1: [],
            2: [("mtp.2.norm.weight", "BF16", [D]), ("mtp.2.markov_head.embed.weight", "BF16", [VOCAB, 256]),
                ("mtp.2.markov_head.head.weight", "BF16", [VOCAB, 256]), ("mtp.2.confidence_head.proj.weight", "BF16", [1, D + 256])]}


def vision():
    out = [("vision.patch_embed.proj.weight", "BF16", [1024, 588]), ("vision.patch_embed.proj.bias", "BF16", [1024]), ("vision.norm.weight", "BF16", [1024])]
    for n in range(32):
        p = f"vision.blocks.{n}."
        out += [(p + "norm1.weight", "BF16", [1024]), (p + "norm2.weight", "BF16", [1024]), (p + "attn.wqkv.weight", "BF16", [3072, 1024]),
                (p + "attn.wqkv.bias", "BF16", [3072]), (p + "attn.wo.weight", "BF16", [1024, 1024]), (p + "attn.wo.bias", "BF16", [1024]),
                (p + "mlp.w1.weight", "BF16", [5632, 1024]), (p + "mlp.w2.weight", "BF16", [1024, 2816])]
    return out + [("aligner.w1.weight", "BF16", [D, 9216]), ("aligner.w1.bias", "BF16", [D]), ("aligner.w2.weight", "BF16", [D, D]), ("aligner.w2.bias", "BF16", [D])]


IMAGE = [(f"image_{k}", "BF16", [D]) for k in ("start", "end", "newline")]
EMBED = [("embed.weight", "BF16", [VOCAB, D])]
NORM = [("norm.weight", "BF16", [D])]
HEAD = ("head", D, VOCAB, bf16, "head")
MAIN_PROJ = ("mtp.0.main_proj", 3 * D, D, fp8, "main_proj")


# ---- Files

def n_bytes(dtype, shape):
    n = SIZES[dtype]
    for d in shape:
        n *= d
    return n


def write_file(path, tensors, markers=False):
    """Header and a sparse body. Wide types first; the codebook markers are the only data."""
    tensors = sorted(tensors, key=lambda t: (-SIZES[t[1]], t[0]))
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        size = n_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape in tensors:
            if markers and name.endswith(".mul1"):
                f.seek(8 + len(text) + header[name]["data_offsets"][0])
                f.write(struct.pack("<I", MUL1))
        f.truncate(8 + len(text) + at)
    return at


def write_folder(folder, files, config_json, extra=()):
    folder.mkdir(parents=True)
    total, weight_map = 0, {}
    for name, tensors in files.items():
        total += write_file(folder / name, tensors, markers=True)
        weight_map.update((t[0], name) for t in tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_json, indent=2))
    for name, text in extra:
        (folder / name).write_text(text)
    print(f"{folder}: {len(weight_map)} tensors, {total} bytes in {len(files)} files")


def native(matrices):
    return [t for stem, i, o, form, _ in matrices for t in form(stem, o, i)]


def official(folder):
    groups = [vision(), EMBED + IMAGE]
    for layer in range(LAYERS):
        p = f"layers.{layer}."
        groups.append(native(m for m in block_matrices(p, EXPERTS, layer) if m[4] != "engram") + block_plain(p, EXPERTS, layer))
    groups.append(native([HEAD]) + NORM)
    for stage in range(STAGES):
        p = f"mtp.{stage}."
        groups.append(native(block_matrices(p, DRAFT_EXPERTS, None) + ([MAIN_PROJ] if stage == 0 else [])) + block_plain(p, DRAFT_EXPERTS, None) +
                      drafter_plain()[stage])
    for layer in sorted(ENGRAM_ROWS):
        tables, gates = engram(layer)
        groups.append(tables + gates + fp8(f"layers.{layer}.engram.wkv", 25600, 6144))
    write_folder(folder, {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}, config())


def exl3(stem, i, o, bits):
    return [(stem + ".trellis", "I16", [i // 16, o // 16, 16 * bits]), (stem + ".suh", "F16", [i]), (stem + ".svh", "F16", [o]), (stem + ".mul1", "I32", [])]


def shuffled(counts, floor_of, n_first, seed):
    """Widths in the given numbers, in a fixed random order; the last entries from n_first on have floor_of or more."""
    low = [w for w, n in counts.items() for _ in range(n) if w < floor_of]
    high = [w for w, n in counts.items() for _ in range(n) if w >= floor_of]
    rng = random.Random(seed)
    rng.shuffle(high)
    total = len(low) + len(high)
    tail, rest = high[:total - n_first], low + high[total - n_first:]
    rng.shuffle(rest)
    return rest + tail


def widths(layout):
    """bits(stem, kind, layer, expert, w) with layer None for the drafter; None: native."""
    if layout == "vllm":
        experts = shuffled({2: 6157, 3: 7689, 4: 1479, 5: 35}, 3, 37 * EXPERTS, 27)
        backbone = {"wq_a": 4, "wq_b": 4, "wo_b": 4, "wo_a": 5, "shared": 4, "head": 4}
        drafter = {"wq_a": 5, "wq_b": 5, "wo_b": 5, "wo_a": 5, "shared": 5, "main_proj": 5, "expert": 3}
        return lambda kind, layer, e, w: (drafter.get(kind) if layer is None and kind != "head" else
                                          experts[layer * EXPERTS + e] if kind == "expert" else backbone.get(kind))
    if layout == "exllamav3":
        def bits(kind, layer, e, w):
            if layer is None and kind != "head":
                return 4
            if kind == "shared":
                return 5 if layer <= 10 or layer >= 30 or (layer == 29 and w == "w2") else 4
            if kind == "expert":
                return 2 if 18 <= layer <= 22 else 3
            if kind == "engram":
                return 5 if layer == 1 else 4
            return {"wq_a": 5, "wkv": 5, "wq_b": 5, "wo_b": 5, "wo_a": 5, "compressor": 5, "indexer": 5, "wk": 8, "head": 6}[kind]
        return bits
    gate_up = shuffled({2: 5949, 3: 7000, 4: 2262, 5: 149}, 3, 36 * EXPERTS, 28)
    down = shuffled({2: 5950, 3: 6998, 4: 2263, 5: 149}, 3, 36 * EXPERTS, 29)

    def ragged(kind, layer, e, w):
        if layer is None and kind != "head":
            return 4
        if kind == "expert":
            return (down if w == "w2" else gate_up)[layer * EXPERTS + e]
        if kind == "shared":
            return 5 if layer <= 3 else 6
        five = {0: ("wq_a", "wkv", "wo_a"), 1: ("wkv", "wo_a"), 2: ("wkv",)}
        if kind in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
            return 5 if kind in five.get(layer, ()) else 4
        return {"compressor": 5, "indexer": 5, "wk": 8, "engram": 5, "head": 6}[kind]
    return ragged


def pack(layout, folder):
    """(name of the file, tensors) by the layout's rules."""
    bits_of = widths(layout)
    files, plan, dense = {}, {}, {}

    def put(name, tensors):
        files.setdefault(name, []).extend(tensors)

    def file_for(stem, layer, expert, is_native):
        if layout == "exllamav3":
            return "embed" if stem.startswith("embed") else "vision" if stem.startswith(("vision", "aligner", "image")) else f"block-{layer if layer is not None else stem.split('.')[0:2]}"
        if layout == "tensorfold":
            return "native" if is_native else f"layer-{layer:02d}" if layer is not None else "head-mtp"
        if is_native:
            return "embed" if stem.startswith("embed") else "vision" if stem.startswith(("vision", "aligner", "image")) else f"block-{layer if layer is not None else stem.split('.')[0:2]}"
        if layer is None:
            return "model-exl3-head" if stem == "head" else "model-exl3-mtp-experts" if expert is not None else "model-exl3-mtp"
        return f"model-exl3-dense-L{layer:02d}" if expert is None else f"model-exl3-L{layer:02d}-p{0 if expert < EXPERTS // 2 else 1}"

    def put_matrix(matrix, layer):
        stem, i, o, form, kind = matrix
        parts = stem.split(".experts.")
        expert, w = (int(parts[1].split(".")[0]), stem[-2:]) if len(parts) == 2 else (None, stem[-2:])
        bits = bits_of(kind, layer, expert, w)
        if bits is None:
            return put(file_for(stem, layer, expert, True), form(stem, o, i))
        to = file_for(stem, layer, expert, False)
        if kind == "wo_a":
            for g in range(8):
                put(to, exl3(f"{stem}.slice.{g}", 4096, 1024, bits))
        else:
            put(to, exl3(stem, i, o, bits))
        if kind == "expert":
            if w == "w1":
                plan.setdefault(stem.split(".ffn.")[0], []).append(str(bits))
        elif kind != "head":
            dense[stem] = bits

    def put_plain(tensors, layer):
        for t in tensors:
            if not (layout == "exllamav3" and t[0].endswith("bias_vl")):  # absent from the public packs of this layout
                put(file_for(t[0], layer, None, True), [t])

    put_plain(vision() + IMAGE + EMBED + NORM, None)
    put_matrix(HEAD, None)
    for layer in range(LAYERS):
        p = f"layers.{layer}."
        for m in block_matrices(p, EXPERTS, layer):
            put_matrix(m, layer)
        put_plain(block_plain(p, EXPERTS, layer) + (engram(layer)[1] if layer in ENGRAM_ROWS else []), layer)
    for stage in range(STAGES):
        p = f"mtp.{stage}."
        for m in ([MAIN_PROJ] if stage == 0 else []) + block_matrices(p, DRAFT_EXPERTS, None):
            put_matrix(m, None)
        put_plain(block_plain(p, DRAFT_EXPERTS, None) + drafter_plain()[stage], None)

    numbered = [n for n in files if not n.startswith(("model-exl3", "layer-", "head-mtp", "native"))]
    names = {n: n + ".safetensors" for n in files}
    total = 46 if layout == "vllm" else len(numbered)
    names.update((n, f"model-{i:05d}-of-{total:05d}.safetensors") for i, n in enumerate(numbered, 1))
    settings, extra = config(), []
    original = settings["quantization_config"]
    if layout == "exllamav3":
        settings["quantization_config"] = {"quant_method": "exl3", "version": "1.4.2", "bits": 2.9, "head_bits": 6, "calibration": {"rows": 250, "cols": 2048},
                                           "out_scales": "auto", "codebook": "mul1", "mtp_bits": 4, "original_quantization_config": original}
    elif layout == "vllm":
        settings["quantization_config"] = {"quant_method": "deepseek_v41_exl3", "exl3_moe": {
            "plan": "exl3_moe_plan.json", "decode_kernel": "coop", "tp_layout": "channels", "exllamav3_version": "1.6.0", "head": "exl3", "head_k": 4,
            "dense": dense}}
        extra.append(("exl3_moe_plan.json", json.dumps({"layers": {str(n): "".join(plan[f"layers.{n}"]) for n in range(LAYERS)},
                                                        "drafter": ["".join(plan[f"mtp.{k}"]) for k in range(STAGES)]})))
    write_folder(folder, {names[n]: t for n, t in files.items()}, settings, extra)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("official", "exllamav3", "vllm", "tensorfold"))
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if os.path.lexists(arguments.folder):
        parser.error(f"{arguments.folder} exists already; name a new folder")
    if arguments.kind == "official":
        official(arguments.folder)
    else:
        pack(arguments.kind, arguments.folder)


if __name__ == "__main__":
    main()
