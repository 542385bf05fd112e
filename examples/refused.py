"""What the verifier is for: a zero-bubble schedule is built, lowered and proved; then it is broken, and refused."""

import sys

import penstock as ps
from penstock.cli.main import main as command


def main() -> int:
    schedule = ps.schedule("zbv", ranks=4, microbatches=8)
    print("1. A zero-bubble schedule: forward F, backward for the input I, backward for the weights W.\n", flush=True)
    command(["show", "zbv", "--ranks", "4", "--microbatches", "8"])

    program = ps.lower(schedule)
    print("\n2. Lowered: every send, receive and gradient reduction has its place. The start of rank 1:\n")
    print("  ", " ".join(str(action) for action in program[1][:16]), "...")

    print("\n3. Proved before it runs:\n")
    print(indented(ps.verify(program)))
    ps.verify(program, semantics="rendezvous")
    print("   and so is the order in which both ends of every message must meet (rendezvous, one NCCL communicator)")

    print("\n4. The same program with the first send of rank 0 moved behind work that needs its answer. Refused:\n")
    try:
        ps.verify(broken(program))
    except ps.VerifyError as refused:
        print(indented(refused))
        return 0
    print("the broken program was not refused", file=sys.stderr)
    return 1


def broken(program: ps.Program) -> ps.Program:
    """Rank 0 keeps its first activation until the gradient of that microbatch is back, which needs the activation."""
    rows = [list(row) for row in program]
    send, answer = ps.Action.parse("0SEND_F0"), ps.Action.parse("0RECV_B0")
    rows[0].remove(send)
    rows[0].insert(rows[0].index(answer) + 1, send)
    return ps.Program.from_actions(rows, program.placement, microbatches=program.microbatches, name="zbv, broken")


def indented(said: object) -> str:
    return "\n".join(f"   {line}".rstrip() for line in str(said).splitlines())


if __name__ == "__main__":
    sys.exit(main())
