import os

# What `int4moe tune` has measured on a machine must not decide what its tests run.
os.environ["INT4MOE_TUNE_FILE"] = "off"
