#!/usr/bin/env python3
"""Packed products on one core beside llama.cpp's quantized kernels, in one run.

bench/exl3_cpu.py BENCH_EXL3_CPU [--ggml DIR] [--out FILE] [--rounds N] [--memory-mb N] [K...]

BENCH_EXL3_CPU is the built program bench_exl3_cpu. DIR holds libggml-base.so and libggml-cpu.so; without it the source package
llama-cpp-python is fetched with pip into a temporary folder and its ggml built with GGML_NATIVE=ON (minutes).

Method: the two sides take turns for N rounds on one thread; every figure is the least time of all rounds. llama.cpp multiplies
through ggml graphs of one mul_mat on its CPU backend, each with another weight buffer, both in the file's layout and in its
repacked one where it has one; the faster is reported and named. Set `memory`: 5120x2304, buffers of at least --memory-mb
together; set `cache`: one 1024x1024 matrix again and again (four nodes a graph). Both sides include the quantization of the
activations; ours also includes the two rotations.
"""
import argparse
import ctypes as C
import glob
import os
import pathlib
import random
import subprocess
import sys
import tarfile
import tempfile
import time

# ggml's type numbers and block sizes (weights, bytes).
TYPES = {"Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
         "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34)}
# The kernel of the nearest width, by stored bits a weight (2.63, 3.44, 4.5, 5.5, 6.56).
NEAREST = {"1.5": "Q2_K", "2": "Q2_K", "2.5": "Q2_K", "3": "Q3_K", "3.5": "Q3_K", "4": "Q4_K", "5": "Q5_K", "6": "Q6_K"}
ROWS = [1, 4, 16]
SHAPES = {"memory": (5120, 2304), "cache": (1024, 1024)}


def build_ggml(folder):
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "llama-cpp-python",
                    "-d", folder], check=True)
    archive = glob.glob(os.path.join(folder, "llama_cpp_python-*.tar.gz"))[0]
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    source = glob.glob(os.path.join(folder, "llama_cpp_python-*/vendor/llama.cpp"))[0]
    build = os.path.join(folder, "build")
    off = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")]
    on = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON"]
    subprocess.run(["cmake", "-S", source, "-B", build, *on, "-DGGML_OPENMP=OFF", "-DLLAMA_CURL=OFF", *off], check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", build, "-j2", "--target", "ggml"], check=True, stdout=subprocess.DEVNULL)
    return os.path.join(build, "bin")


class InitParams(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class Ggml:
    def __init__(self, folder):
        self.base = C.CDLL(os.path.join(folder, "libggml-base.so"), mode=C.RTLD_GLOBAL)
        self.cpu = C.CDLL(os.path.join(folder, "libggml-cpu.so"), mode=C.RTLD_GLOBAL)
        pointer, number = C.c_void_p, C.c_int64
        self.declare(self.base, "ggml_init", pointer, InitParams)
        self.declare(self.base, "ggml_free", None, pointer)
        self.declare(self.base, "ggml_version", C.c_char_p)
        self.declare(self.base, "ggml_commit", C.c_char_p)
        self.version = f"{self.base.ggml_version().decode()} ({self.base.ggml_commit().decode()})"
        self.declare(self.base, "ggml_new_tensor_2d", pointer, pointer, C.c_int, number, number)
        self.declare(self.base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.declare(self.base, "ggml_new_graph_custom", pointer, pointer, C.c_size_t, C.c_bool)
        self.declare(self.base, "ggml_build_forward_expand", None, pointer, pointer)
        self.declare(self.base, "ggml_quantize_chunk", C.c_size_t, C.c_int, pointer, pointer, number, number, number, pointer)
        self.declare(self.base, "ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
        self.declare(self.base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
        self.declare(self.base, "ggml_backend_buffer_free", None, pointer)
        self.declare(self.base, "ggml_backend_tensor_set", None, pointer, pointer, C.c_size_t, C.c_size_t)
        self.declare(self.base, "ggml_backend_graph_compute", C.c_int, pointer, pointer)
        self.declare(self.base, "ggml_backend_get_default_buffer_type", pointer, pointer)
        self.declare(self.base, "ggml_backend_dev_backend_reg", pointer, pointer)
        self.declare(self.base, "ggml_backend_get_device", pointer, pointer)
        self.declare(self.base, "ggml_backend_reg_get_proc_address", pointer, pointer, C.c_char_p)
        self.declare(self.base, "ggml_backend_dev_supports_op", C.c_bool, pointer, pointer)
        self.declare(self.base, "ggml_log_set", None, pointer, pointer)
        self.quiet = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)(lambda level, text, data: None)
        self.base.ggml_log_set(self.quiet, None)
        self.declare(self.base, "ggml_backend_buft_name", C.c_char_p, pointer)
        self.declare(self.cpu, "ggml_backend_cpu_init", pointer)
        self.declare(self.cpu, "ggml_backend_cpu_set_n_threads", None, pointer, C.c_int)
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, 1)
        self.device = device = self.base.ggml_backend_get_device(self.backend)
        address = self.base.ggml_backend_reg_get_proc_address(self.base.ggml_backend_dev_backend_reg(device),
                                                              b"ggml_backend_dev_get_extra_bufts")
        self.buffer_types = {"file layout": self.base.ggml_backend_get_default_buffer_type(self.backend)}
        if address:
            listed = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(address)(device)
            i = 0
            while listed and listed[i]:
                if b"REPACK" in self.base.ggml_backend_buft_name(listed[i]).upper():
                    self.buffer_types["repacked"] = listed[i]
                i += 1

    @staticmethod
    def declare(library, name, result, *arguments):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments

    def quantized(self, type_name, k, n):
        """One matrix's bytes; 64 quantized rows repeated, since only their number matters to speed."""
        number, block, size = TYPES[type_name]
        rng = random.Random(7)
        rows = 64
        values = (C.c_float * (rows * k))(*[rng.gauss(0, 0.02) for _ in range(rows * k)])
        out = C.create_string_buffer(rows * k // block * size)
        self.base.ggml_quantize_chunk(number, values, out, 0, rows, k, None)
        return out.raw * (n // rows)


class Case:
    """One graph per weight buffer of one type, layout and shape, for one number of rows; `repeats` mul_mat nodes each."""

    def __init__(self, ggml, type_name, layout, data, shape, rows, copies, repeats):
        self.ggml, self.repeats, self.next, self.least, self.supported = ggml, repeats, 0, 1e30, True
        base = ggml.base
        k, n = shape
        self.weights = base.ggml_init(InitParams(copies * 1024 + 65536, None, True))
        tensors = [base.ggml_new_tensor_2d(self.weights, TYPES[type_name][0], k, n) for _ in range(copies)]
        self.weight_buffer = base.ggml_backend_alloc_ctx_tensors_from_buft(self.weights, ggml.buffer_types[layout])
        self.work = base.ggml_init(InitParams(copies * (repeats + 1) * 8192 + (1 << 20), None, True))
        x = base.ggml_new_tensor_2d(self.work, 0, k, rows)
        self.graphs = []
        for tensor in tensors:
            graph = base.ggml_new_graph_custom(self.work, 16 + 4 * repeats, False)
            for _ in range(repeats):
                node = base.ggml_mul_mat(self.work, tensor, x)
                self.supported = self.supported and base.ggml_backend_dev_supports_op(ggml.device, node)
                base.ggml_build_forward_expand(graph, node)
            if self.supported:
                base.ggml_backend_tensor_set(tensor, data, 0, len(data))
            self.graphs.append(graph)
        self.work_buffer = base.ggml_backend_alloc_ctx_tensors(self.work, ggml.backend)
        rng = random.Random(5)
        values = (C.c_float * (k * rows))(*[rng.gauss(0, 1) for _ in range(k * rows)])
        base.ggml_backend_tensor_set(x, values, 0, 4 * k * rows)

    def run(self):
        graph = self.graphs[self.next % len(self.graphs)]
        self.next += 1
        start = time.perf_counter()
        status = self.ggml.base.ggml_backend_graph_compute(self.ggml.backend, graph)
        self.least = min(self.least, (time.perf_counter() - start) / self.repeats)
        if status != 0:
            raise SystemExit(f"ggml_backend_graph_compute failed with {status}")

    def close(self):
        for buffer in (self.weight_buffer, self.work_buffer):
            self.ggml.base.ggml_backend_buffer_free(buffer)
        for context in (self.weights, self.work):
            self.ggml.base.ggml_free(context)


def run_ours(program, widths, rounds, memory_mb, encoder):
    command = [program, "--raw", "--rounds", str(rounds), "--memory-mb", str(memory_mb), *widths]
    if not encoder:
        command.append("--no-encoder")
    machine, cells, encoders = None, {}, {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        kind, *fields = line.split("\t")
        if kind == "machine":
            machine = (fields[0], fields[1], float(fields[2]), float(fields[3]))
        elif kind == "encoder":
            encoders[fields[0]] = float(fields[1])
        else:
            width, group, mode, rows, rate, operations, read = fields
            cells[width, group, mode, int(rows)] = (float(rate), float(operations), float(read))
    return machine, cells, encoders


def run_theirs(ggml, types, memory_mb, calls, best):
    for type_name in types:
        for group, (k, n) in SHAPES.items():
            data = ggml.quantized(type_name, k, n)
            copies, repeats = (-(-memory_mb * (1 << 20) // len(data)), 1) if group == "memory" else (1, 4)
            for layout in ggml.buffer_types:
                for rows in ROWS:
                    case = Case(ggml, type_name, layout, data, (k, n), rows, copies, repeats)
                    if case.supported:  # else there is no repacked form of this type
                        for _ in range(calls):
                            case.run()
                        rate = k * n / case.least * 1e-9
                        if rate > best.get((type_name, group, rows), (0, ""))[0]:
                            best[type_name, group, rows] = (rate, layout)
                    case.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--ggml")
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-mb", type=int, default=96)
    parser.add_argument("widths", nargs="*", default=["1.5", "2", "2.5", "3", "3.5", "4", "5", "6"])
    arguments = parser.parse_intermixed_args()
    temporary = tempfile.TemporaryDirectory()
    ggml = Ggml(arguments.ggml or build_ggml(temporary.name))
    ours, encoders, theirs, machine = {}, {}, {}, None
    types = sorted({NEAREST[w] for w in arguments.widths} | {"Q4_0", "Q8_0"})
    for turn in range(arguments.rounds):
        now, cells, encoder = run_ours(arguments.program, arguments.widths, 60, arguments.memory_mb, turn < 2)
        machine = now if machine is None else (*now[:2], max(machine[2], now[2]), max(machine[3], now[3]))
        for key, value in cells.items():
            old = ours.get(key, (0, 0, 0))
            ours[key] = tuple(max(a, b) for a, b in zip(old, value))
        for width, seconds in encoder.items():
            encoders[width] = min(seconds, encoders.get(width, 1e30))
        run_theirs(ggml, types, arguments.memory_mb, 60, theirs)
        print(f"turn {turn + 1} of {arguments.rounds} done", file=sys.stderr)

    lines = [f"machine: {machine[0]}, tier {machine[1]}, one thread, clock {machine[2] * 1e-9:.2f} GHz, plain reads "
             f"{machine[3] * 1e-9:.1f} GB/s (best of the turns)",
             f"date: {time.strftime('%Y-%m-%d')}; load average at the end {os.getloadavg()[0]:.1f}",
             f"llama.cpp: ggml {ggml.version} of llama-cpp-python, GGML_NATIVE=ON, the faster of {' and '.join(ggml.buffer_types)}",
             f"command: bench/exl3_cpu.py bench_exl3_cpu --rounds {arguments.rounds} --memory-mb {arguments.memory_mb}",
             "Billions of weights a second and core; least time of all turns. Floors: two vector operations a cycle; trellis bytes",
             "at the rate of plain reads.", ""]
    for group, (k, n) in SHAPES.items():
        lines += [f"{group}: {k}x{n}",
                  "K    m   plain  residual  llama.cpp            plain/theirs  residual/theirs  floors: operations  bytes"]
        for width in arguments.widths:
            for rows in ROWS:
                plain, residual = ours[width, group, "plain", rows], ours[width, group, "residual", rows]
                rate, layout = theirs[NEAREST[width], group, rows]
                ours_part = f"{width:4} {rows:2} {plain[0]:7.2f} {residual[0]:9.2f}"
                ratios = f"{plain[0] / rate:10.2f} {residual[0] / rate:16.2f} {plain[1]:19.2f} {plain[2]:6.2f}"
                lines.append(f"{ours_part}  {NEAREST[width]:5}{rate:6.2f} {layout:11} {ratios}")
        for name in ("Q4_0", "Q8_0"):
            cells = [(rows, *theirs[name, group, rows]) for rows in ROWS]
            lines.append(f"  {name}: " + ", ".join(f"m={rows} {rate:.2f} ({layout})" for rows, rate, layout in cells))
        if ("3", group, "exact", 1) in ours:
            lines.append(f"  exl3_matmul (fp32, exact), K = 3, m = 1: {ours['3', group, 'exact', 1][0]:.2f}")
        lines.append("")
    if encoders:
        lines.append("trellis encoder, one pass per tile, mul1, seconds per million weights and core:")
        lines.append("  " + ", ".join(f"K={width} {seconds:.2f}" for width, seconds in encoders.items()))
    lost = [(w, g, r) for w in arguments.widths for g in SHAPES for r in ROWS
            if ours[w, g, "plain", r][0] < theirs[NEAREST[w], g, r][0]]
    lines.append("not slower than llama.cpp's kernel of the nearest width (plain): " +
                 ("everywhere" if not lost else "except " + ", ".join(f"K={w} {g} m={r}" for w, g, r in lost)))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        pathlib.Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main()
