"""Media: what is fetched and from where, what is decoded and how, and that hostile bytes and hosts gain nothing."""
import asyncio
import base64
import contextlib
import io
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
import tracemalloc
import zlib
from fractions import Fraction

import anyio
import av
import numpy
import pytest
from conftest import main, wait_until
from PIL import Image, ImageOps

WHERE = "messages[0].content[1]"
PUBLIC = "93.184.216.34"
LEAKS = re.compile(r"0x[0-9a-f]{6,}|object at|/|Error|Traceback|\.py|127\.|localhost")
linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted as on Linux")


def png(width=4, height=3, colour="red"):
    return saved(Image.new("RGB", (width, height), colour))


def saved(image, form="PNG", **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


PNG = png()
BASE64 = base64.b64encode(PNG).decode()


def fetch(url, kind="image", **settings):
    return asyncio.run(main.fetch_media(main.MediaSource(kind, url, WHERE), main.Settings(**settings)))


def refused(call, *args, code="invalid_media", **options):
    """The sentence with which the call is refused, which names the place and tells nothing of us."""
    with pytest.raises(main.ApiError) as caught:
        call(*args, **options)
    error = caught.value.body["error"]
    assert (caught.value.status_code, error["code"], error["param"]) == (400, code, WHERE)
    assert error["message"].startswith(f"{WHERE}: ") and not LEAKS.search(error["message"]), error["message"]
    return error["message"]


def image(data, **settings):
    return main.decode_image(data, WHERE, main.Settings(**settings))


def video(data, **settings):
    return main.decode_video(data, WHERE, main.Settings(**settings))


def audio(data, rate=16_000, **settings):
    return main.decode_audio(data, rate, WHERE, main.Settings(**settings))


@contextlib.contextmanager
def little_memory(mib):
    """The process's peak may grow by so much and no more."""
    import resource
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mib * 1024


# -- Hosts -----------------------------------------------------------------------------------------------------
class Listener:
    """A server on loopback that counts who connects, reads one request and sends what it is told to."""

    def __init__(self, answer=b"", tls=None):
        self.answer, self.tls, self.requests, self.hits = answer, tls, [], 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                peer = self.socket.accept()[0]
                self.hits += 1
                threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer):
        with contextlib.suppress(OSError), peer:
            if self.tls:
                peer = self.tls.wrap_socket(peer, server_side=True)
            self.requests.append(peer.recv(65_536).decode())
            if isinstance(self.answer, bytes):
                peer.sendall(self.answer)
            else:
                self.answer(peer)

    def close(self):
        self.socket.close()


def http(body=PNG, status="200 OK", **headers):
    lines = {"Content-Length": len(body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    return f"HTTP/1.1 {status}\r\n".encode() + b"".join(
        f"{name}: {value}\r\n".encode() for name, value in lines.items() if value is not None) + b"\r\n" + body


class Internet:
    """Names that resolve to addresses, one answer after the other, and addresses that are listeners here."""

    def __init__(self):
        self.names, self.hosts, self.asked, self.connected = {}, {}, [], []

    def host(self, name, answer, address=PUBLIC, port=80):
        listener = Listener(answer)
        self.names[name] = [[address]]
        self.hosts[address, port] = listener
        return listener


@pytest.fixture
def internet(monkeypatch):
    net, resolve, connect = Internet(), asyncio.BaseEventLoop.getaddrinfo, anyio.connect_tcp

    async def getaddrinfo(loop, host, port, **options):
        net.asked.append(host)
        if host not in net.names:  # a number in whatever spelling, or the machine's own name
            if not re.fullmatch(r"[0-9a-fx.:]+|localhost", host):
                raise socket.gaierror(socket.EAI_NONAME, "unknown here")
            return await resolve(loop, host, port, **options)
        answers = net.names[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(None, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def connect_tcp(remote_host, remote_port, **options):
        net.connected.append((remote_host, remote_port))
        if (remote_host, remote_port) not in net.hosts:
            return await connect(remote_host, remote_port, **options)
        return await connect("127.0.0.1", net.hosts[remote_host, remote_port].port, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(anyio, "connect_tcp", connect_tcp)
    yield net
    for listener in net.hosts.values():
        listener.close()


@pytest.fixture
def inside():
    """A listener that nobody may ever reach."""
    listener = Listener(http())
    yield listener
    socket.create_connection(("127.0.0.1", listener.port)).close()
    wait_until(lambda: listener.hits)  # connections are accepted in their order, so this one is the first
    listener.close()
    assert listener.hits == 1


opened = None  # while it is a list: the files that are opened


def watch_opens(event, args):
    # The last is where a logged traceback looks for compiled lines.
    ours = (".py", ".pyc", ".so", ".pem", os.devnull, "<unknown>")
    if opened is not None and event == "open" and not (isinstance(args[0], int) or str(args[0]).endswith(ours)):
        opened.append(str(args[0]))


sys.addaudithook(watch_opens)


@contextlib.contextmanager
def watched_opens():
    global opened
    opened = seen = []
    try:
        yield seen
    finally:
        opened = None


# -- Data URLs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("url", [
    f"data:image/png;base64,{BASE64}", f"DATA:IMAGE/PNG;BASE64,{BASE64}", f"data:;base64,{BASE64}",
    f"data:image/png;charset=utf-8;base64,{BASE64}", f"data:image/png;name=a%2Cb.png; base64 ,{BASE64}",
    f"data:image/png;base64,{BASE64.rstrip('=')}",
    f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode()}",
    "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    "data:image/png;base64," + "\r\n".join(BASE64[i:i + 76] for i in range(0, len(BASE64), 76)),
    "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG)])
def test_a_data_url_is_read_in_every_spelling(url):
    assert fetch(url) == PNG


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_long_data_url_is_read_whole_wherever_its_pieces_end(length, escaped):
    data = os.urandom(1_000_000 + length)
    text = base64.urlsafe_b64encode(data).decode().rstrip("=")
    text = text.replace("-", "%2D").replace("_", "%5F") if escaped else text
    assert fetch("data:video/mp4;base64," + text) == data


@pytest.mark.parametrize("url", [
    "data:image/png;base64", "data:image/png;base64,", "data:", "data:,", "data:image/png;base64,=",
    "data:;base64,====", f"data:image/png;base64,{BASE64[:-3]}*==",
    f"data:image/png;base64,{BASE64[:5]}", "data:;base64,äöü=",
    "data:;base64,%%%%", f"data:image/png;base64,\0{BASE64}"])
def test_a_data_url_that_holds_nothing_or_no_base64_is_refused(url):
    refused(fetch, url)


def test_a_data_url_of_escapes_alone_has_a_bound():
    assert fetch("data:," + "%41" * 1000) == b"A" * 1000
    with pytest.raises(main.ApiError, match="too many escapes"):
        fetch("data:," + "%" * (2**21 + 1))


def test_base64_without_the_word_base64_is_refused():
    url = f"data:image/png,{BASE64}"
    assert "decoded" in refused(lambda: image(fetch(url)))


@pytest.mark.parametrize("url", [
    "", " ", BASE64, "ftp://a.test/x", "javascript:1", "blob:http://a.test/1", "//a.test/x"])
def test_what_is_neither_data_nor_web_is_refused(url):
    refused(fetch, url, code="unsupported_content")


@pytest.mark.parametrize("kind, setting", [
    ("image", "max_image_mib"), ("audio", "max_audio_mib"), ("video", "max_video_mib"), ("file", "max_video_mib")])
def test_data_larger_than_the_setting_of_its_kind_is_refused_by_the_settings_name(kind, setting):
    url = "data:;base64," + "A" * (4 * 2**18)
    assert len(fetch(url, kind, **{setting: 0.75})) == 0.75 * 2**20
    assert setting.upper() in refused(fetch, url, kind, **{setting: 0.749})


def test_a_data_url_beyond_its_bound_costs_no_memory():
    urls = ["data:;base64," + "A" * 2**25, "data:," + "%" * 2**25, "data:," + "%41" * 2**23]
    tracemalloc.start()
    for url in urls:
        refused(fetch, url, max_image_mib=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * 2**20


# -- URLs ------------------------------------------------------------------------------------------------------
def test_a_url_is_fetched_from_the_address_of_its_name_with_its_name_as_host(internet, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    site = internet.host("pictures.test", http(Set_Cookie="a=b"))
    assert fetch("HTTP://Pictures.Test/a/ä b.png?x=1#part".replace(" ", "%20")) == PNG
    head = site.requests[0].lower().splitlines()
    assert head[0] == "get /a/%c3%a4%20b.png?x=1 http/1.1" and "host: pictures.test" in head
    assert "accept-encoding: identity" in head and not [line for line in head if line.startswith(("cookie", "auth"))]
    assert internet.connected == [(PUBLIC, 80)]


def test_tls_asks_for_the_name_and_a_host_that_cannot_prove_it_is_refused(internet):
    names = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.sni_callback = lambda _, name, __: names.append(name)
    site = internet.host("pictures.test", http(), port=443)
    site.tls = tls
    refused(fetch, "https://pictures.test/a.png")
    assert (names, site.requests, internet.connected) == (["pictures.test"], [], [(PUBLIC, 443)])


def test_ipv4_goes_before_ipv6(internet):
    internet.host("pictures.test", http())
    internet.names["pictures.test"] = [["2606:4700::1111", PUBLIC]]
    assert fetch("http://pictures.test/") == PNG


def test_a_redirect_is_followed_without_the_cookies_and_connection_of_the_first_host(internet):
    first = internet.host("one.test", http(b"", "302 Found", Location="//two.test/b.png", Set_Cookie="a=b"))
    internet.names["two.test"] = [[PUBLIC]]
    first.answer = lambda peer: peer.sendall(
        http(b"", "302 Found", Location="//two.test/b.png", Set_Cookie="a=b") if len(first.requests) == 1 else http())
    assert fetch("http://one.test/a.png") == PNG
    assert first.hits == 2 and "two.test" in first.requests[1] and "cookie" not in first.requests[1].lower()


@pytest.mark.parametrize("answer", [
    http(status="404 Not Found"), http(status="500 Oops"), http(status="204 No Content", body=b""),
    http(b"", "302 Found"), http(status="206 Partial Content"), b"", b"garbage\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000])
def test_whatever_is_wrong_with_an_answer_is_told_in_the_same_sentence(internet, answer):
    internet.host("pictures.test", answer)
    assert refused(fetch, "http://pictures.test/") == refused(fetch, "http://unknown.test/")


def test_urls_can_be_switched_off(internet, inside):
    internet.host("pictures.test", http())
    assert "data URL" in refused(fetch, "http://pictures.test/", media_urls=False, code="unsupported_content")
    assert fetch(f"data:;base64,{BASE64}", media_urls=False) == PNG
    assert (internet.asked, internet.connected) == ([], [])


def test_a_listed_host_is_fetched_from_wherever_it_is_and_no_other(inside):
    site = Listener(http())
    for listed in (f"127.0.0.1:{site.port}", "other.test, 127.0.0.1 ", f"LOCALHOST,127.0.0.1:{site.port}"):
        for media_urls in (True, False):
            assert fetch(f"http://127.0.0.1:{site.port}/", media_allow_hosts=listed, media_urls=media_urls) == PNG
    refused(fetch, f"http://127.0.0.1:{inside.port}/", media_allow_hosts=f"127.0.0.1:{site.port}")
    refused(fetch, f"http://127.0.0.1:{inside.port}/", media_allow_hosts=f"localhost,27.0.0.1,127.0.0.1:{site.port}")
    site.close()


def test_with_urls_switched_off_the_listed_hosts_are_the_only_ones(internet):
    internet.host("pictures.test", http())
    internet.names["other.test"] = [[PUBLIC]]
    assert fetch("http://pictures.test/", media_urls=False, media_allow_hosts="pictures.test") == PNG
    refused(fetch, "http://other.test/", media_urls=False, media_allow_hosts="pictures.test")


PRIVATE = [
    "127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1",
    "2002:7f00:1::", "2002:a00:1::1", "2001:db8::1", "2001::1", "100::1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_s1_an_address_that_is_not_on_the_internet_is_not_public(address):
    assert not main.is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:4700::1111", "64:ff9b::101:101", "2002:101:101::1"])
def test_an_address_on_the_internet_is_public(address):
    assert main.is_public(address)


@pytest.mark.parametrize("host", [
    "127.0.0.1", "localhost", "[::1]", "0.0.0.0", "169.254.169.254", "10.0.0.1", "[::ffff:127.0.0.1]", "2130706433",
    "0x7f.1", "127.1", "[fe80::1%25lo]", "[64:ff9b::7f00:1]", "0177.0.0.1", "[::]", "[::7f00:1]", "LOCALHOST"])
@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_s1_nothing_is_asked_of_an_inner_address_and_open_and_closed_ports_look_alike(internet, inside, host, scheme):
    urls = [f"{scheme}://{host}{port}/x" for port in ("", ":80", ":443", f":{inside.port}", ":1")]
    sentences = {refused(fetch, url, kind) for url in urls for kind in ("image", "video", "audio", "file")}
    assert len(sentences) == 1 and internet.connected == []


@pytest.mark.parametrize("port", [22, 81, 8080, 0, 65536, 99999])
def test_a_public_host_is_asked_at_the_ports_of_the_web_only(internet, port):
    internet.names["pictures.test"] = [[PUBLIC]]
    refused(fetch, f"http://pictures.test:{port}/")
    assert (internet.asked, internet.connected) == ([], [])


@pytest.mark.parametrize("status", ["301 A", "302 B", "303 C", "307 D", "308 E"])
@pytest.mark.parametrize("target", [
    "http://127.0.0.1:{port}/", "//127.0.0.1:{port}/", "http://127.0.0.1/", "http://inner.test/", "file:///etc/passwd",
    "data:image/png;base64," + BASE64, "http://a.test\\@127.0.0.1:{port}/", "http://[::1]/", "gopher://127.0.0.1:{port}/"])
def test_s2_a_redirect_to_the_inside_is_not_followed(internet, inside, status, target):
    internet.host("a.test", http(b"", status, Location=target.format(port=inside.port)))
    internet.names["inner.test"] = [["10.0.0.1"]]
    with watched_opens() as files:
        refused(fetch, "http://a.test/")
    assert internet.connected == [(PUBLIC, 80)] and not [name for name in files if "passwd" in name]


def test_s2_a_listed_host_may_not_redirect_to_one_that_is_not_listed(inside):
    site = Listener(http(b"", "302 Found", Location=f"http://127.0.0.1:{inside.port}/"))
    refused(fetch, f"http://127.0.0.1:{site.port}/", media_allow_hosts=f"127.0.0.1:{site.port}")
    assert site.hits == 1
    site.close()


@pytest.mark.parametrize("hops", [3, 4, 1000])
def test_s2_three_redirects_are_followed_and_no_more(internet, hops):
    def answer(peer):
        n = len(site.requests)
        peer.sendall(http() if n > hops else http(b"", "302 Found", Location=f"/{n}"))

    site = internet.host("a.test", answer)
    if hops == 3:
        assert fetch("http://a.test/") == PNG
    else:
        refused(fetch, "http://a.test/")
    assert site.hits == 4


def test_s3_a_name_is_resolved_once_and_the_checked_address_connected_to(internet, inside):
    internet.host("rebinding.test", http())
    internet.names["rebinding.test"] = [[PUBLIC], ["127.0.0.1"]]
    assert fetch("http://rebinding.test/") == PNG
    assert (internet.asked, internet.connected) == (["rebinding.test"], [(PUBLIC, 80)])


@pytest.mark.parametrize("addresses", [
    [PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], [PUBLIC, "::1"], ["64:ff9b::7f00:1"]])
def test_s3_a_name_with_one_inner_address_is_not_connected_to_at_all(internet, inside, addresses):
    internet.names["mixed.test"] = [addresses]
    refused(fetch, "http://mixed.test/")
    assert internet.connected == []


@pytest.mark.parametrize("url", [
    "http://a.test\\@127.0.0.1:{port}/", "http://a.test@127.0.0.1:{port}/", "http://a.test:80@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}#@a.test", "http://127.0.0.1:{port}\\@a.test/", "http://a.test./", "http://a.test/\t",
    "http://a\t.test/", "http://a.test/\n", "http://a.test/ x", "http:// a.test/", "http://a.test:80:{port}/",
    "http://a。test/", "http://ⓐ.test/", "http://a.test%2f@127.0.0.1:{port}/", "http:///a.test/", "http://a..test/",
    "http://user:pass@a.test/", "http://a.test;@127.0.0.1/", "http://[::1/", "http://]/", "http://", "http://a.test:/",
    "http://a.test:x/", "http://%61.test/", "http://a.test\0/", "http://a.test/\x7f", "http://" + "a" * 70 + ".test/",
    "http://a.test:٨٠/", "http:\\\\a.test\\"])
def test_s4_a_url_that_two_parsers_could_read_differently_is_refused(internet, inside, url):
    internet.host("a.test", http())
    refused(fetch, url.format(port=inside.port), **({"code": "unsupported_content"} if "//" not in url else {}))
    assert internet.connected == []


# -- Files -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [
    "file:///etc/hostname", "FILE:///etc/hostname", "/etc/hostname", "media/plain.png", "C:\\x", "\\\\host\\share",
    "README.md", "~/.bashrc", "file://localhost/etc/hostname", "/proc/self/environ", "."])
def test_s5_no_path_is_opened_unless_the_operator_named_a_folder(name):
    with watched_opens() as files:
        refused(fetch, name, code="unsupported_content")
    assert files == []


@pytest.mark.parametrize("name", [
    "../secret.png", "/etc/hostname", "{tmp}/secret.png", "file://{tmp}/secret.png", "link.png",
    "folder/../../secret.png", "file:///etc/hostname", "missing.png", ".", "", "folder", "pipe", "a\0b", "x" * 5000,
    "..", "loop/a", "root/../secret.png", "file://{tmp}/root/%2e%2e/secret.png", "{tmp}/rootsecret/a.png"])
def test_s5_nothing_outside_of_the_operators_folder_is_opened_and_all_look_alike(tmp_path, name):
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "rootsecret").mkdir()
    for path in (tmp_path / "secret.png", tmp_path / "rootsecret" / "a.png"):
        path.write_bytes(PNG)
    if os.name != "nt":
        (root / "link.png").symlink_to(tmp_path / "secret.png")
        (root / "loop").symlink_to(root / "loop")
        os.mkfifo(root / "pipe")
    with watched_opens() as files:
        sentence = refused(fetch, name.format(tmp=tmp_path), media_root=root)
    assert files == [] and sentence == refused(fetch, "nothing.png", media_root=root)


def test_a_file_below_the_operators_folder_is_read_by_path_or_file_url(tmp_path):
    (tmp_path / "a folder").mkdir()
    path = tmp_path / "a folder" / "a.png"
    path.write_bytes(PNG)
    for name in ("a folder/a.png", str(path), path.as_uri(), "a folder/../a folder/a.png"):
        assert fetch(name, media_root=tmp_path) == PNG
    assert "MAX_IMAGE_MIB" in refused(fetch, str(path), media_root=tmp_path, max_image_mib=1e-6)


# -- Bodies ----------------------------------------------------------------------------------------------------
def endless(peer):
    peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        peer.sendall(b"x" * 65_536)


def dripping(peer):
    peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        peer.sendall(b"x")
        time.sleep(0.05)


def slow_head(peer):
    for byte in b"HTTP/1.1 200 OK\r\nX-Y: " + b"z" * 1000:
        peer.sendall(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.parametrize("answer", [http(b"x" * 2**21), http(b"x" * 2**21, Content_Length=None), endless,
                                    http(b"x" * 100, Content_Length=10 * 2**30)])
def test_s6_a_body_beyond_its_bound_is_left_and_costs_no_more_than_the_bound(internet, answer):
    internet.host("pictures.test", answer)
    tracemalloc.start()
    assert "MAX_IMAGE_MIB" in refused(fetch, "http://pictures.test/", max_image_mib=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * 2**20


@pytest.mark.parametrize("answer", [dripping, slow_head, lambda peer: peer.recv(1)])
def test_s6_a_body_that_does_not_end_in_time_is_left(internet, answer):
    internet.host("pictures.test", answer)
    refused(fetch, "http://pictures.test/", media_fetch_seconds=0.3)


@pytest.mark.parametrize("encoding", [
    "gzip", "deflate", "br", "zstd", ", ".join(["gzip"] * 50), "GZIP", "identity, gzip"])
def test_s7_a_compressed_body_is_refused_and_never_unpacked(internet, encoding):
    packed = zlib.compress(bytes(2**26))
    internet.host("pictures.test", http(packed, Content_Encoding=encoding))
    tracemalloc.start()
    refused(fetch, "http://pictures.test/")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_s7_the_body_of_a_redirect_is_not_read(internet):
    sent = []

    def answer(peer):
        peer.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://b.test/\r\nContent-Encoding: gzip\r\n\r\n")
        while len(sent) < 1000:
            peer.sendall(b"x" * 2**20)
            sent.append(1)

    internet.host("a.test", answer)
    internet.host("b.test", http(), address="1.1.1.1")
    assert fetch("http://a.test/") == PNG
    assert len(sent) < 100


# -- Images ----------------------------------------------------------------------------------------------------
def corners(picture):
    array = numpy.asarray(picture)
    return [tuple(int(c) for c in array[y, x]) for y in (0, -1) for x in (0, -1)]


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "GIF", "JPEG", "WEBP", "AVIF"])
def test_every_format_is_seen_as_rgb(form):
    picture = image(saved(Image.new("RGB", (20, 10), (200, 30, 60)), form))
    assert (picture.mode, picture.size) == ("RGB", (20, 10))
    assert numpy.abs(numpy.asarray(picture).astype(int) - (200, 30, 60)).max() < 12


def test_one_pixel_is_a_picture():
    assert corners(image(png(1, 1)))[0] == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_stands_as_its_exif_orientation_says(orientation, form):
    original = Image.effect_noise((16, 8), 90).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(form, {})
    turned = image(saved(original, form, exif=exif, **options))
    plain = image(saved(original, form, **options))
    plain.getexif()[0x0112] = orientation
    assert numpy.array_equal(turned, ImageOps.exif_transpose(plain))
    assert turned.size == ((16, 8) if orientation < 5 else (8, 16))


@pytest.mark.parametrize("mode, colour, seen", [
    ("1", 1, (255, 255, 255)), ("L", 100, (100, 100, 100)), ("LA", (100, 255), (100, 100, 100)),
    ("LA", (0, 0), (255, 255, 255)), ("RGBA", (9, 9, 9, 0), (255, 255, 255)), ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
    ("RGBA", (0, 0, 0, 51), (204, 204, 204)), ("I;16", 0x80FF, (128, 128, 128)), ("I;16", 255, (0, 0, 0))])
def test_a_mode_is_seen_as_people_see_it(mode, colour, seen):
    assert corners(image(saved(Image.new(mode, (3, 3), colour))))[0] == seen


def test_palettes_and_their_transparency_are_seen_as_people_see_them():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    for form in ("PNG", "GIF"):
        assert corners(image(saved(palette, form)))[:2] == [(10, 20, 30), (200, 100, 50)]
        assert corners(image(saved(palette, form, transparency=0)))[:2] == [(255, 255, 255), (200, 100, 50)]


def test_cmyk_and_16_bit_tiff_are_seen_as_people_see_them():
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert corners(image(saved(cmyk, "TIFF")))[0] == (255, 0, 0)
    red = corners(image(saved(cmyk, "JPEG")))[0]
    assert red[0] > 240 and red[1] < 15
    deep = Image.fromarray(numpy.array([[0, 256, 32_768, 65_535]], numpy.uint16))
    for form in ("PNG", "TIFF"):
        assert numpy.asarray(image(saved(deep, form)))[0, :, 0].tolist() == [0, 1, 128, 255]


def bare_png(width, height, *chunks):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes((1 + (width + 7) // 8) * height)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + rows + chunk(b"IEND", b"")


def webp_canvas(side):
    data = bytearray(saved(Image.new("RGB", (60, 40)), "WEBP", save_all=True,
                           append_images=[Image.new("RGB", (60, 40), "red")]))
    data[24:30] = struct.pack("<I", side - 1)[:3] * 2
    return bytes(data)


@linux
def test_s8_a_picture_of_too_many_pixels_is_refused_before_any_is_decoded():
    bombs = [bare_png(12_800, 12_800), bare_png(30_016, 30_016), webp_canvas(16_383)]
    with little_memory(30):
        for bomb in bombs:
            assert "50 megapixels" in refused(image, bomb)
    assert "0.1 megapixels" in refused(image, png(400, 251), max_image_megapixels=0.1)
    assert image(png(400, 250), max_image_megapixels=0.1).size == (400, 250)


@linux
def test_a_picture_larger_than_any_model_looks_at_is_made_smaller():
    seen = image(saved(Image.new("RGB", (6000, 4000), "red"), "PNG"))
    assert seen.width * seen.height <= 2**24 < 1.01 * seen.width * seen.height
    assert seen.width / seen.height == pytest.approx(1.5, abs=0.01) and seen.getpixel((99, 99)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (60_000, 2)])
def test_a_picture_that_is_a_line_is_refused(size):
    assert "200 times" in refused(image, saved(Image.new("L", size), "PNG"))
    assert image(saved(Image.new("L", (200, 1)), "PNG")).size == (200, 1)


def test_s8_a_tile_much_larger_than_its_picture_is_refused():
    def tiff(side):
        pixels = zlib.compress(bytes(side * side))
        tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, 134),
                (325, len(pixels))]
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels

    assert image(tiff(64)).size == (16, 16)
    assert "megapixels" in refused(image, tiff(8000))


def test_s8_a_text_chunk_that_unpacks_to_a_gigabyte_is_refused():
    bomb = bare_png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**28))))
    with little_memory(80):
        refused(image, bomb)


@linux
def test_s8_one_frame_of_an_animation_is_decoded():
    frames = [Image.new("RGB", (100, 100), (i % 256, i // 256, 0)) for i in range(1500)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    del frames
    with little_memory(10):
        assert corners(image(data))[0] == (0, 0, 0)


FITS = b"".join(line.ljust(80) for line in (
    b"SIMPLE  =                    T", b"BITPIX  =                    8", b"NAXIS   =                    2",
    b"NAXIS1  =                   10", b"NAXIS2  =                   10", b"END")).ljust(2880) + bytes(2880)


@pytest.mark.parametrize("data", [
    FITS, b"8BPS\0\1" + bytes(60), *(saved(Image.new("RGB", (16, 16)), form) for form in (
        "JPEG2000", "EPS", "PPM", "TGA", "ICO", "PCX", "SGI", "DDS", "PDF")),
    saved(Image.new("F", (16, 16)), "SPIDER"), b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"\xff\x4f\xff\x51" + bytes(64)])
def test_s8_formats_beside_the_known_ones_are_refused(data):
    refused(image, data)


JPEG = saved(Image.effect_noise((64, 64), 80), "JPEG")


@pytest.mark.parametrize("data", [
    b"", b"not an image", b"\x89PNG\r\n\x1a\n", PNG[:45], JPEG[:len(JPEG) // 2], b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 ",
    b"\0\0\0\x0cjP  \r\n\x87\n", b"II*\0\xff\xff\xff\xff", b"BM" + bytes(60), b"\0" * 1000])
def test_s12_what_cannot_be_decoded_is_told_in_one_sentence_that_leaks_nothing(data):
    assert refused(image, data) == f"{WHERE}: this image could not be decoded."
    assert refused(video, data) == f"{WHERE}: this video could not be decoded."
    assert refused(audio, data) == f"{WHERE}: this audio could not be decoded."


# -- Films -----------------------------------------------------------------------------------------------------
class Pipe:
    """What a container is written to that cannot be gone back in: its header stays without durations and counts."""

    def __init__(self):
        self.data = bytearray()

    def write(self, data):
        self.data += data
        return len(data)


def film(pictures=40, form="mp4", codec="libx264", rate=10, size=(64, 48), stamps=None, piped=False, sound=None,
         **options):
    """A film whose n-th picture is a little lighter than the one before it, or the pictures that are given."""
    out, (width, height) = Pipe() if piped else io.BytesIO(), size
    if isinstance(pictures, int):
        shades = [n * 255 // max(1, pictures - 1) for n in range(pictures)]
        pictures = [numpy.full((height, width, 3), shade, numpy.uint8) for shade in shades]
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, options={name: str(value) for name, value in options.items()})
        stream.width, stream.height, stream.pix_fmt = width, height, {"gif": "rgb8"}.get(codec, "yuv420p")
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000) if stamps else Fraction(1, rate)
        heard = container.add_stream("aac", rate=16_000, layout="mono") if sound is not None else None
        for n, picture in enumerate(pictures):
            is_array = isinstance(picture, numpy.ndarray)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24") if is_array else picture
            frame.pts, frame.time_base = (stamps[n] if stamps else n), stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if heard:
            mux_sound(container, heard, sound, 16_000)
    return bytes(out.data) if piped else out.getvalue()


def mux_sound(container, stream, samples, rate):
    channels = stream.layout.nb_channels
    planes = numpy.repeat(samples.astype(numpy.float32)[None], channels, 0)
    for start in range(0, samples.size, 1024):
        piece = numpy.ascontiguousarray(planes[:, start:start + 1024])
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=stream.layout.name)
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        for ready in av.AudioResampler(stream.format, stream.layout, rate).resample(frame):
            container.mux(stream.encode(ready))
    container.mux(stream.encode())


def greys(seen):
    return [int(frame.mean()) for frame in seen.frames]


FORMS = [
    ("mp4", "libx264", {"g": 10, "bf": 3}), ("mp4", "libx264", {"g": 1}), ("mp4", "libx264", {"g": 1000}),
    ("mov", "libx264", {"g": 5, "bf": 2}), ("matroska", "libx264", {"g": 10, "bf": 3}),
    ("webm", "libvpx-vp9", {"g": 10}),
    ("mpegts", "libx264", {"g": 10, "bf": 3}), ("flv", "libx264", {"g": 10}), ("asf", "mpeg4", {"g": 10}),
    ("avi", "mpeg4", {"g": 10}), ("gif", "gif", {})]


@pytest.mark.parametrize("form, codec, options", FORMS)
@pytest.mark.parametrize("count", [1, 4, 16, 40, 64])
def test_frames_are_spread_evenly_over_a_film_in_every_container(form, codec, options, count):
    data = film(40, form, codec, **options)
    seen = video(data, max_video_frames=count)
    wanted = [n * 40 // count for n in range(count)] if count < 40 else list(range(40))
    assert numpy.allclose(seen.times, [n / 10 for n in wanted], atol=0.011)
    assert numpy.allclose(greys(seen), [n * 255 // 39 for n in wanted], atol=6)
    assert seen.frames.shape == (len(wanted), 48, 64, 3) and seen.frames.dtype == numpy.uint8
    assert seen.duration == pytest.approx(4, abs=0.05) and not audio(data).size


@pytest.mark.parametrize("form, codec", [("webm", "libvpx-vp9"), ("matroska", "libx264"), ("mpegts", "libx264")])
def test_a_header_without_duration_and_count_does_not_matter(form, codec):
    seen = video(film(20, form, codec, piped=True), max_video_frames=5)
    assert numpy.allclose(seen.times, [0, 0.4, 0.8, 1.2, 1.6], atol=0.011)
    assert seen.duration == pytest.approx(2, abs=0.05)


def test_a_header_that_lies_about_the_duration_does_not_matter():
    data = bytearray(film(20))
    for box, place in ((b"mvhd", 20), (b"tkhd", 24), (b"mdhd", 20)):
        at = data.index(box) + place
        data[at:at + 4] = struct.pack(">I", 2**31 - 1)
    assert video(bytes(data), max_video_frames=2).times == (0, 1)


def test_a_film_of_changing_rate_is_sampled_by_time_and_not_by_count():
    stamps = [*range(0, 1000, 50), 2000, 3000]  # twenty pictures in the first second, two in the next two
    seen = video(film(22, stamps=stamps, bf=0), max_video_frames=4)
    assert numpy.allclose(seen.times, [0, 0.75, 0.95, 2], atol=0.06)


def test_of_a_film_that_begins_between_key_frames_what_can_be_seen_is_spread_evenly():
    data = film(60, "mpegts", g=20, size=(320, 240), crf=10)
    seen = video(data[188 * (len(data) // 188 // 8):], max_video_frames=8)
    steps = numpy.diff(seen.times)
    assert 4 < len(seen.times) <= 8 and steps.min() > 0.3 and sorted(greys(seen)) == greys(seen)


def test_a_film_of_one_picture_is_that_picture():
    seen = video(film(1))
    assert (seen.frames.shape, seen.times, seen.duration) == ((1, 48, 64, 3), (0,), 0)


@pytest.mark.parametrize("turns, matrix", [
    (0, (1, 0, 0, 1)), (1, (0, -1, 1, 0)), (2, (-1, 0, 0, -1)), (3, (0, 1, -1, 0))])
def test_a_film_stands_as_its_rotation_says(turns, matrix):
    picture = numpy.zeros((48, 64, 3), numpy.uint8)
    picture[:24, :32] = 255
    data = bytearray(film([picture] * 3, crf=0))
    at, (a, b, c, d) = data.index(b"tkhd") + 44, matrix
    data[at:at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    assert numpy.abs(video(bytes(data)).frames[0].astype(int) - numpy.rot90(picture, turns)).mean() < 3


def test_a_large_film_is_made_smaller_until_all_of_its_frames_fit():
    seen = video(film(16, size=(640, 480), preset="ultrafast"), max_image_megapixels=1)
    assert seen.frames.shape == (16, 216, 288, 3)
    assert video(film(2, size=(640, 480)), max_image_megapixels=1).frames.shape == (2, 480, 640, 3)


def test_a_film_without_pictures_is_refused():
    assert "no moving pictures" in refused(video, recording(seconds=0.2))
    picture = b"\0image/png\0\x03\0" + PNG
    frame = b"APIC" + struct.pack(">IH", len(picture), 0) + picture
    size = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))
    song = b"ID3\x03\0\0" + size + frame + recording("mp3", "libmp3lame")
    assert "no moving pictures" in refused(video, song) and main.kind_of(song) == "audio" and audio(song).size > 9000
    refused(video, film(0))
    refused(video, b"")


def test_the_sound_beside_the_pictures_can_be_heard():
    seen = film(10, sound=tone(1, 16_000))
    assert video(seen).frames.shape[0] == 10
    assert abs(audio(seen).size - 16_000) <= 2048 and pitch(audio(seen), 16_000) == pytest.approx(440, abs=5)


def test_s9_of_a_long_film_no_more_frames_are_kept_than_the_setting_says():
    data = film(2400, size=(32, 32), preset="ultrafast", g=50)
    seen = video(data)
    assert seen.frames.shape == (16, 32, 32, 3) and seen.times == tuple(15.0 * n for n in range(16))


@linux
def test_s9_frames_of_too_many_pixels_are_refused_before_any_is_decoded():
    data = film([av.VideoFrame(4096, 4096, "yuv420p")], size=(4096, 4096), preset="ultrafast")
    with little_memory(30):
        assert "megapixels" in refused(video, data)
    small = bytearray(data)
    at = small.index(b"avc1") + 28
    small[at:at + 4] = struct.pack(">HH", 64, 48)  # the container says so, the stream does not
    with little_memory(60):
        refused(video, bytes(small))


def test_s9_a_film_whose_frames_cost_too_much_to_find_is_refused(monkeypatch):
    data = film(40, g=1000)
    monkeypatch.setattr(main, "MAX_DECODED_PIXELS", 64 * 48 * 30)
    assert "key frames" in refused(video, data)
    assert len(video(film(40, g=1)).times) == 16


def index_bomb(data, samples):
    """An MP4 that says it has so many samples of one byte."""
    data = bytearray(data)
    for box, place, numbers in (
            (b"stsz", 8, (1, samples)), (b"stts", 8, (1, samples, 1)), (b"stsc", 12, (1, samples, 1))):
        at = data.index(box) + place
        data[at:at + 4 * len(numbers)] = struct.pack(f">{len(numbers)}I", *numbers)
    return bytes(data)


@linux
@pytest.mark.parametrize("samples", [80_000_000, 2**32 - 1])
def test_s9_a_small_film_that_claims_millions_of_frames_gets_no_memory_for_them(samples):
    data = index_bomb(film(8), samples)
    with little_memory(50):
        refused(video, data)


@linux
def test_s9_a_film_of_a_thousand_tracks_is_refused():
    data = index_bomb(film(8), 1_000_000)
    start, end = (data.index(box) - 4 for box in (b"moov", b"trak"))
    track = data[end:end + struct.unpack(">I", data[end:end + 4])[0]]
    size = struct.unpack(">I", data[start:start + 4])[0]
    bomb = data[:start] + struct.pack(">I", size + 999 * len(track)) + data[start + 4:end] + track * 1000 + data[
        end + len(track):]
    with little_memory(800):
        refused(video, bomb)


def test_s9_more_media_than_a_request_may_have_are_refused_by_their_count():
    def check(*kinds, **settings):
        main.check_counts([main.MediaSource(kind, "data:,", WHERE) for kind in kinds], main.Settings(**settings))

    check(*["image"] * 3, "video", "audio", max_images=3, max_videos=1, max_audios=1)
    check(*["file"] * 5, max_images=3, max_videos=1, max_audios=1)
    for kind, setting in (("image", "max_images"), ("video", "max_videos"), ("audio", "max_audios")):
        refused(check, *[kind] * 4, **{setting: 3})
        refused(check, kind, **{setting: 0})
    refused(check, *["video"] * 100)
    refused(check, *["file"] * 6, max_images=3, max_videos=1, max_audios=1)


# -- Sound -----------------------------------------------------------------------------------------------------
def tone(seconds, rate, hertz=440):
    return 0.5 * numpy.sin(2 * numpy.pi * hertz * numpy.arange(int(seconds * rate)) / rate)


def pitch(samples, rate):
    return numpy.abs(numpy.fft.rfft(samples)).argmax() * rate / samples.size


def recording(form="wav", codec="pcm_s16le", rate=44_100, layout="stereo", seconds=1.0):
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        mux_sound(container, stream, tone(seconds, rate), rate)
    return out.getvalue()


@pytest.mark.parametrize("form, codec, rate, layout", [
    ("wav", "pcm_s16le", 44_100, "stereo"), ("wav", "pcm_f32le", 16_000, "mono"), ("wav", "pcm_u8", 8_000, "mono"),
    ("wav", "pcm_s24le", 96_000, "5.1"), ("mp3", "libmp3lame", 44_100, "stereo"), ("flac", "flac", 48_000, "stereo"),
    ("ogg", "libopus", 48_000, "stereo"), ("ogg", "flac", 44_100, "stereo"), ("ipod", "aac", 22_050, "mono"),
    ("adts", "aac", 44_100, "stereo"), ("webm", "libopus", 48_000, "mono"), ("aiff", "pcm_s16be", 22_050, "mono")])
@pytest.mark.parametrize("wanted", [16_000, 24_000, 48_000])
def test_any_sound_becomes_one_channel_at_the_rate_that_is_asked_for(form, codec, rate, layout, wanted):
    heard = audio(recording(form, codec, rate, layout), wanted)
    assert heard.dtype == numpy.float32 and heard.ndim == 1
    assert abs(heard.size - wanted) < 0.12 * wanted
    assert pitch(heard, wanted) == pytest.approx(440, abs=5)
    assert 0.3 < numpy.abs(heard).max() < (1.3 if layout != "5.1" else 3)


def test_tags_in_other_alphabets_do_not_matter():
    data = recording()
    tag = b"INAM" + struct.pack("<I", 6) + b"caf\xe9\xff\0"
    data = data[:4] + struct.pack("<I", len(data) + 12 + len(tag)) + data[8:] + b"LIST" + struct.pack(
        "<I", 4 + len(tag)) + b"INFO" + tag
    assert audio(data).size == 16_000


def test_silence_of_no_length_is_refused():
    data = recording()
    empty = data[:data.index(b"data") + 4] + bytes(4)
    for data in (empty, film(3)):
        assert "no sound" in refused(main.perceive, main.MediaSource("audio", "", WHERE), data, 16_000, main.Settings())


@pytest.mark.parametrize("seconds, limit", [(2, 1.9), (60, 5)])
@linux
def test_s10_sound_beyond_its_seconds_is_refused_while_it_is_decoded(seconds, limit):
    data = recording("ogg", "libopus", 48_000, "stereo", seconds)
    with little_memory(30):
        assert "seconds" in refused(audio, data, max_audio_seconds=limit)
    assert audio(data, max_audio_seconds=seconds + 1).size == pytest.approx(seconds * 16_000, abs=2000)


def test_a_sound_of_just_the_seconds_that_are_allowed_is_heard():
    assert audio(recording(seconds=2, rate=44_100), max_audio_seconds=2).size == pytest.approx(32_000, abs=10)


def test_a_film_is_refused_for_its_sound_by_that_name():
    source = main.MediaSource("video", "", WHERE)
    data = film(10, sound=tone(3, 16_000))
    assert len(main.perceive(source, data, 16_000, main.Settings())) == 2
    assert len(main.perceive(source, data, None, main.Settings(max_audio_seconds=1))) == 1
    assert "video's sound" in refused(main.perceive, source, data, 16_000, main.Settings(max_audio_seconds=1))


def test_s10_a_header_that_claims_gigabytes_gets_what_is_there():
    data = bytearray(recording(rate=16_000, layout="mono"))
    data[4:8] = data[data.index(b"data") + 4:data.index(b"data") + 8] = struct.pack("<I", 2**31)
    assert audio(bytes(data)).size == 16_000


@pytest.mark.parametrize("rate", [0, 1, 100, 2_000_000_000])
@linux
def test_s10_a_rate_that_would_multiply_the_samples_is_refused(rate):
    data = bytearray(recording(rate=16_000, layout="mono"))
    data[24:28] = struct.pack("<I", rate)
    with little_memory(20):
        refused(audio, bytes(data))


# -- What decoders must not do ---------------------------------------------------------------------------------
SCRIPTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n",
    "hls-file": "#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile http://127.0.0.1:{port}/a.mp4\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\n"
           "a=rtpmap:96 H264/90000\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><BaseURL>'
            'http://127.0.0.1:{port}/</BaseURL></Period></MPD>',
    "rtsp": "RTSP/1.0 200 OK\r\n", "asx": '<asx version="3.0"><entry><ref href="http://127.0.0.1:{port}/"/></entry></asx>',
    "ref": "[Reference]\nRef1=http://127.0.0.1:{port}/a.asf\n", "ffmeta": ";FFMETADATA1\ntitle=x\n",
    "image2": "/etc/%d.png"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_s11_a_playlist_is_no_film_and_nothing_that_it_names_is_opened(inside, name):
    data = SCRIPTS[name].format(port=inside.port).encode()
    with watched_opens() as files:
        for decode in (image, video, audio):
            refused(decode, data)
        assert main.kind_of(data) == "file"
    assert files == []


@pytest.mark.parametrize("name", ["hls", "concat", "sdp"])
def test_s11_a_playlist_inside_of_a_film_is_not_followed(inside, name):
    script = SCRIPTS[name].format(port=inside.port).encode()
    gab2 = b"GAB2\0\x02\0" + struct.pack("<I", 2) + b"x\0" + struct.pack("<HI", 4, len(script)) + script
    data = film(10, "avi", "mpeg4", sound=tone(1, 16_000)).replace(b"auds", b"txts").replace(b"01wb", b"01tx")
    at = data.index(b"01tx")
    data = data[:at] + b"01tx" + struct.pack("<I", len(gab2)) + gab2 + b"\0" * (len(gab2) % 2) + data[at:]
    with watched_opens() as files:
        assert video(data).frames.shape[0] == 10
        refused(audio, data)
    assert files == []


def test_s13_no_file_is_written_by_anything_good_or_bad(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    good = [PNG, film(4), recording(seconds=0.1), pdf("hello"), b"text"]
    with watched_opens() as files:
        for data in [*good, *(data[:len(data) // 2] for data in good), b"\xff" * 100]:
            for read in (image, video, audio, text_of):
                with contextlib.suppress(main.ApiError):
                    read(data)
            main.kind_of(data)
    assert files == [] and list(tmp_path.iterdir()) == []


# -- Files -----------------------------------------------------------------------------------------------------
def pdf(*pages):
    """A PDF with a line of text on each page."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[%s]/Count %d>>" % (
        b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(pages))), len(pages)),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    fonts = b"/Resources<</Font<</F 3 0 R>>>>"
    for n, line in enumerate(pages):
        content = b"BT /F 12 Tf 10 10 Td (%s) Tj ET" % line.encode("latin-1")
        objects += [b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents %d 0 R%s>>" % (5 + 2 * n, fonts),
                    b"<</Length %d>>stream\n%s\nendstream" % (len(content), content)]
    data, places = b"%PDF-1.4\n", []
    for n, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj%s\nendobj\n" % (n, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return data + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1, table, len(objects) + 1, len(data))


def text_of(data):
    return asyncio.run(main.file_text(data, WHERE))


@pytest.mark.parametrize("kind, data", [
    ("image", PNG), ("image", JPEG), ("image", saved(Image.new("RGB", (9, 9)), "GIF")), ("video", film(3)),
    ("image", bare_png(30_016, 30_016)), ("video", film(3, "webm", "libvpx-vp9")), ("audio", recording(seconds=0.1)),
    ("audio", recording("mp3", "libmp3lame", seconds=0.2)), ("audio", recording("ipod", "aac", seconds=0.2)),
    ("file", pdf("x")), ("file", b"text"), ("file", "grüße".encode()), ("file", b"<svg/>"), ("file", b""),
    ("file", b"\x80\x81\0"), ("file", "hi".encode("utf-16"))])
def test_what_a_file_is_shows_in_its_content(kind, data):
    assert main.kind_of(data) == kind


@pytest.mark.parametrize("data", ["grüße\n".encode(), b"\xef\xbb\xbf" + "grüße\n".encode(), "grüße\n".encode("utf-16")])
def test_a_text_is_read_in_the_encodings_that_say_so(data):
    assert text_of(data) == "grüße\n"


def test_a_pdf_says_what_stands_on_its_pages():
    assert text_of(pdf("Hello there", "and again")).split() == ["Hello", "there", "and", "again"]


@pytest.mark.parametrize("data", [
    b"", b" \n ", b"\xff\xfe\0", b"caf\xe9", b"a\0b", b"%PDF-1.4", b"%PDF-1.4\n" + b"1 0 obj" * 1000, pdf(""), pdf(),
    PNG, pdf("x").replace(b"/Kids[4 0 R]", b"/Kids[2 0 R]")])
def test_a_file_that_says_nothing_is_refused(data):
    refused(text_of, data)


def test_a_pdf_has_bounds(monkeypatch):
    packed = zlib.compress(b"BT /F 12 Tf " + b"9 9 Td (hello) Tj " * 500_000 + b"ET")
    data = pdf("x")
    start, end = data.index(b"<</Length"), data.index(b"endstream")
    bomb = b"<</Filter/FlateDecode/Length %d>>stream\n%s\n" % (len(packed), packed)
    refused(text_of, data[:start] + bomb + data[end:])
    assert text_of(pdf(*["a"] * 50)).count("a") == 50
    monkeypatch.setattr(main, "MAX_PDF_SECONDS", 1)  # of its processor
    refused(text_of, slow_pdf())


def slow_pdf():
    """Many pages that are all the same long one."""
    data = pdf(*["a"] * 3000)
    page = data.index(b"<</Length")
    return data[:page] + b"<</Length 1>>stream\n" + b"BT " + b"(x) Tj " * 60_000 + b"ET\nendstream " + data[page:]


def test_what_a_pdf_holds_is_not_logged(caplog):
    refused(text_of, b"%PDF-1.4\nthe-secret" + b" 1 0 obj<</the-secret 5 0 R" * 10)
    assert not [record for record in caplog.records if record.name.startswith("pypdf")]
