"""The command of a login whose answer is held back: runs the requested command, then asks the proxy what to do.

    python -S wrapped.py PORT

After the effect of the command it sends the port of the client to the proxy at PORT. The proxy answers `answer`, and
the answer is sent; or `drop`, and the connection is cut as by a machine that loses its power.
"""

import os
import signal
import socket
import subprocess
import sys

port, name = int(sys.argv[1]), os.environ["SSH_CONNECTION"].split()[1]
done = subprocess.run(["/bin/sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]], stdout=subprocess.PIPE)
with socket.create_connection(("127.0.0.1", port)) as control:
    control.sendall(name.encode() + b"\n")
    verdict = control.makefile().readline().strip()
if verdict == "answer":
    sys.stdout.buffer.write(done.stdout)
    sys.exit(done.returncode)
os.kill(os.getppid(), signal.SIGKILL)  # the process of sshd that has this connection
