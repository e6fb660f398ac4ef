"""The client libraries of Stripe, Square, Adyen and PayPal, unchanged, against a sidecar with the profile of their API and a small
service behind it. The first line on the standard output is the port of the service; the first line on the standard input has
the address of a sidecar for each profile. Ends with 0 if every check held, and prints each check.
"""

import json
import socket
import socketserver
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

# The ports of names that are fixed in a library.
PORTS = {}


def look_up(host, port, *_, **__):
    """No name is looked up: every name is this machine. So a library that ignores the address of the sidecar reaches nothing."""
    place = ("127.0.0.1", PORTS.get(host.decode() if isinstance(host, bytes) else host, port))
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place)]


# Before the libraries are imported, so that none of them has the other function.
socket.getaddrinfo = look_up

import Adyen  # noqa: E402
import square  # noqa: E402
import stripe  # noqa: E402
from paypalserversdk import paypal_serversdk_client as paypal  # noqa: E402
from paypalserversdk.configuration import Environment  # noqa: E402
from paypalserversdk.exceptions.error_exception import ErrorException  # noqa: E402
from paypalserversdk.http.auth.o_auth_2 import ClientCredentialsAuthCredentials  # noqa: E402
from square.core.api_error import ApiError  # noqa: E402


class Service:
    """Counts effects, waits while it is held, and fails if it is told to."""

    effects = 0
    status = 200
    opened = threading.Event()
    lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/oauth2/token":
            return self.respond(200, {"access_token": "t", "token_type": "Bearer", "expires_in": 3600})
        with Service.lock:
            Service.effects += 1
            number = Service.effects
        status = Service.status
        Service.opened.wait()
        self.respond(status, Service.body(number) if status < 400 else Service.error)

    def respond(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Line:
    """A line to a sidecar. It cuts the connection when the first byte of a response comes after the next effect. It counts the
    parts of responses.
    """

    def __init__(self, address):
        host, port = address.split(":")
        self.sidecar = (host, int(port))
        self.cuts_after = None
        self.parts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            upstream = socket.create_connection(self.sidecar)
            for ends in [(client, upstream, False), (upstream, client, True)]:
                threading.Thread(target=self.carry, args=ends, daemon=True).start()

    def carry(self, source, target, is_response):
        try:
            while data := source.recv(65536):
                self.parts += is_response
                if is_response and self.cuts_after is not None and self.cuts_after < Service.effects:
                    self.cuts_after = None
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def failed(run):
    try:
        value = run()
    except Exception as error:
        return error
    raise AssertionError(f"no error, but {value!r}")


def again(pay, is_answer):
    """The loop of a caller whose library repeats nothing after a lost connection."""

    def persistent(key, amount):
        try:
            return pay(key, amount)
        except Exception as error:
            if is_answer(error):
                raise
            return pay(key, amount)

    return persistent


def equal(found, expected):
    assert found == expected, f"{found!r} is not {expected!r}"


def speaks(name, vendor):
    """The checks that are the same for all libraries."""

    def check(what, run):
        Service.status = 200
        Service.opened.set()
        before = Service.effects
        run(lambda: Service.effects - before)
        print(f"{name}: {what}", flush=True)

    def lost(effects):
        vendor["line"].cuts_after = Service.effects
        first = vendor["persistent"](f"{name}-lost", 100)
        equal(effects(), 1)
        equal(vendor["line"].cuts_after, None)
        equal(vendor["persistent"](f"{name}-lost", 100), first)
        equal(effects(), 1)

    def double(effects):
        Service.opened.clear()
        with ThreadPoolExecutor() as threads:
            first = threads.submit(vendor["pay"], f"{name}-double", 100)
            while effects() == 0 and not first.done():
                time.sleep(0.005)
            try:
                vendor["is_running"](failed(lambda: vendor["pay"](f"{name}-double", 100)))
            finally:
                Service.opened.set()
            # A retry before its end would be refused, too.
            done = first.result()
            equal(vendor["pay"](f"{name}-double", 100), done)
        equal(effects(), 1)

    def repeated(effects):
        Service.opened.clear()
        with ThreadPoolExecutor() as threads:
            first = threads.submit(vendor["pay"], f"{name}-repeated", 100)
            while effects() == 0 and not first.done():
                time.sleep(0.005)
            parts = vendor["line"].parts
            second = threads.submit(vendor["repeating"], f"{name}-repeated", 100)
            while vendor["line"].parts == parts and not second.done():
                time.sleep(0.005)
            Service.opened.set()
            equal(second.result(), first.result())
        equal(effects(), 1)

    def reused(effects):
        vendor["pay"](f"{name}-reused", 100)
        vendor["is_reused"](failed(lambda: vendor["pay"](f"{name}-reused", 200)))
        equal(effects(), 1)

    def error(effects):
        Service.status = 500
        vendor["is_server_error"](failed(lambda: vendor["persistent"](f"{name}-error", 100)))
        Service.status = 200
        vendor["is_server_error"](failed(lambda: vendor["pay"](f"{name}-error", 100)))
        equal(effects(), 1)

    check("a lost reply is retried, and charged once", lost)
    check("a duplicate of a running request is refused as running", double)
    if "repeating" in vendor:
        check("a library that repeats a duplicate by itself gets the response of the first one", repeated)
    check("a key of another request is refused as such", reused)
    check("a server error is kept, and the library comes to an end", error)


def of_stripe(address):
    line = Line(address)
    Service.body = lambda number: {"id": f"ch_{number}", "object": "charge", "amount": 100}
    Service.error = {"error": {"type": "api_error", "message": "it failed"}}

    def charge(retries):
        bases = {"api": f"http://127.0.0.1:{line.port}"}
        client = stripe.StripeClient("sk_test_1", base_addresses=bases, max_network_retries=retries)

        def pay(key, amount):
            params = {"amount": amount, "currency": "eur", "source": "tok_visa"}
            return client.v1.charges.create(params, {"idempotency_key": key} if key else None).id

        return pay

    def is_error(kind, status, code):
        def check(error):
            equal((type(error), error.http_status, error.error.code), (kind, status, code))

        return check

    speaks("stripe", {
        "line": line,
        "pay": charge(0),
        "persistent": charge(3),
        "repeating": charge(3),
        "is_running": is_error(stripe.APIError, 409, "idempotency_key_in_use"),
        "is_reused": is_error(stripe.IdempotencyError, 400, "idempotency_key_reused"),
        "is_server_error": is_error(stripe.APIError, 500, None),
    })
    # The library makes a key if its caller has none.
    Service.status = 200
    before = Service.effects
    line.cuts_after = before
    charge(3)(None, 100)
    equal((Service.effects, line.cuts_after), (before + 1, None))
    print("stripe: a request under a key of the library is repeated, and charged once", flush=True)


def of_square(address):
    line = Line(address)
    Service.body = lambda number: {"payment": {"id": f"p_{number}", "status": "COMPLETED"}}
    Service.error = {"errors": [{"category": "API_ERROR", "code": "INTERNAL_SERVER_ERROR"}]}
    client = square.Square(token="t", base_url=f"http://127.0.0.1:{line.port}")

    def pay(key, amount, retries=0):
        money = {"amount": amount, "currency": "EUR"}
        options = {"max_retries": retries}
        paid = client.payments.create(
            idempotency_key=key, source_id="cnon", amount_money=money, request_options=options
        )
        return paid.payment.id

    def is_error(status, code):
        def check(error):
            equal((type(error), error.status_code, error.errors[0].code), (ApiError, status, code))

        return check

    speaks("square", {
        "line": line,
        "pay": pay,
        "persistent": again(pay, lambda error: isinstance(error, ApiError)),
        "repeating": lambda key, amount: pay(key, amount, retries=3),
        "is_running": is_error(409, "CONFLICT"),
        "is_reused": is_error(400, "IDEMPOTENCY_KEY_REUSED"),
        "is_server_error": is_error(500, "INTERNAL_SERVER_ERROR"),
    })


def of_adyen(address):
    line = Line(address)
    PORTS["checkout-test.adyen.com"] = line.port
    Service.body = lambda number: {"pspReference": f"psp-{number}", "resultCode": "Authorised"}
    Service.error = {"status": 500, "errorCode": "900", "message": "it failed", "errorType": "internal"}
    client = Adyen.Adyen(xapikey="k", platform="test")

    def pay(key, amount):
        payment = {
            "amount": {"currency": "EUR", "value": amount},
            "merchantAccount": "m",
            "paymentMethod": {"type": "scheme"},
            "reference": "r",
            "returnUrl": "https://shop.example",
        }
        return client.checkout.payments_api.payments(payment, idempotency_key=key).message["pspReference"]

    def is_error(kind, status, code, transient):
        def check(error):
            found = (type(error), error.status_code, error.error_code, error.headers.get("Transient-Error"))
            equal(found, (kind, status, code, transient))

        return check

    speaks("adyen", {
        "line": line,
        "pay": pay,
        "persistent": again(pay, lambda error: isinstance(error, Adyen.AdyenError)),
        "is_running": is_error(Adyen.AdyenAPIUnprocessableEntity, 422, "704", "true"),
        "is_reused": is_error(Adyen.AdyenAPIUnprocessableEntity, 422, "702", "false"),
        "is_server_error": is_error(Adyen.AdyenAPICommunicationError, 500, "900", None),
    })


def of_paypal(address):
    line = Line(address)
    PORTS["api-m.sandbox.paypal.com"] = line.port
    Service.body = lambda number: {"id": f"order-{number}", "status": "CREATED"}
    Service.error = {"name": "INTERNAL_SERVER_ERROR", "message": "it failed", "debug_id": "d"}
    statuses = []

    def create(retries):
        client = paypal.PaypalServersdkClient(
            environment=Environment.SANDBOX,
            client_credentials_auth_credentials=ClientCredentialsAuthCredentials("id", "secret"),
            # The library repeats a POST only if its caller asks for it.
            max_retries=retries,
            retry_methods=["POST"],
            backoff_factor=0.01,
        )

        def pay(key, amount):
            order = {
                "intent": "CAPTURE",
                "purchase_units": [{"amount": {"currency_code": "EUR", "value": f"{amount}.00"}}],
            }
            created = client.orders.create_order({"body": order, "paypal_request_id": key})
            statuses.append(created.status_code)
            return created.body.id

        return pay

    def is_error(status, name, issue):
        def check(error):
            equal((type(error), error.response_code, error.name), (ErrorException, status, name))
            equal(error.details[0].issue if error.details else None, issue)

        return check

    once = create(0)
    speaks("paypal", {
        "line": line,
        "pay": once,
        "persistent": create(3),
        "is_running": is_error(409, "RESOURCE_CONFLICT", "PREVIOUS_REQUEST_IN_PROGRESS"),
        "is_reused": is_error(422, "UNPROCESSABLE_ENTITY", "PAYPAL_REQUEST_ID_PREVIOUSLY_USED"),
        "is_server_error": is_error(500, "INTERNAL_SERVER_ERROR", None),
    })
    Service.status = 201
    statuses.clear()
    equal(once("paypal-created", 100), once("paypal-created", 100))
    equal(statuses, [201, 200])
    print("paypal: a replay of a created order has 200 instead of 201", flush=True)


def main():
    socketserver.ThreadingTCPServer.daemon_threads = True
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sidecars = json.loads(sys.stdin.readline())
    Service.opened.set()
    of_stripe(sidecars["stripe"])
    of_square(sidecars["square"])
    of_adyen(sidecars["adyen"])
    of_paypal(sidecars["paypal"])


main()
