"""Gives a body to each client that says w. Writes the beginning of it to those that do not, and says nothing more until it is told to, without ever
waiting in a write. Then it writes the rest to the last of those, which hears how that went from a line of its own; or it closes that
one, and greets a new client in the same place. Arguments: where it listens, who has the body, its path, its length, that of the
beginning, for how many, and "goes on" or "closes"."""
import select
import socket
import sys

from absent import address, body


def rest(client, whole, done, room):
    """Writes it whenever there is room."""
    while done < len(whole):
        if not room.poll(60):
            sys.exit(f"no room after {done} bytes")
        try:
            while done < len(whole):
                done += client.send(whole[done:])
        except BlockingIOError:
            pass


def tried(client, what):
    """Bytes that were written, and what is said of it."""
    try:
        return client.send(what), b"went on"
    except BlockingIOError:
        return 0, b"is full"
    except ConnectionResetError:
        return len(what), b"is lost"


def main():
    listens, of, path, length, beginning, clients, then = sys.argv[1:]
    length, done = int(length), int(beginning)
    listener = socket.create_server(address(listens))
    buffer = bytearray(length + 65536)
    begun = []
    while len(begun) < int(clients):
        client, _ = listener.accept()
        if client.recv(1) == b"w":
            client.sendall(body(buffer, address(of), path, length))
            client.close()
            continue
        if not begun:
            whole = body(buffer, address(of), path, length)
        client.setblocking(False)
        if client.send(whole[:done]) != done:
            sys.exit("the beginning does not fit")
        begun.append(client)
    other, _ = listener.accept()
    client = begun.pop()
    room = select.epoll()
    room.register(client, select.EPOLLOUT | select.EPOLLET)
    other.recv(1)
    if then == "closes":
        number = client.fileno()
        client.close()
        client, _ = listener.accept()
        if client.fileno() != number:
            sys.exit(f"{client.fileno()} in place of {number}")
        client.setblocking(False)
        other.sendall(tried(client, b"hello")[1])
    else:
        while room.poll(0):
            pass
        more, said = tried(client, whole[done:])
        other.sendall(said)
        rest(client, whole, done + more, room)
    client.close()


main()
