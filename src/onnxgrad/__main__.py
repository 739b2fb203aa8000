"""`python -m onnxgrad …` is the command line, for launchers that start a module: `torchrun -m onnxgrad train …`."""

from onnxgrad.cli import main

if __name__ == "__main__":
    main(prog_name="onnxgrad")
