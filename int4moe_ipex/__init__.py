"""INT4 Mixture-of-Experts language models on x86 CPUs, inside Hugging Face transformers."""

__version__ = "0.1.0"
