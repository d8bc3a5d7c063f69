"""`python -m int4moe_ipex` is `int4moe`."""

from int4moe_ipex.cli import main

main()
