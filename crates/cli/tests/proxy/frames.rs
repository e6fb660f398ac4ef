//! HTTP/2 frame by frame: clients that never open their windows.

use crate::support::{Service, Sidecar, Wire, within};

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A frame (RFC 9113, 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Header fields in the form that needs no table (RFC 7541, 6.2.2).
fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

fn post(key: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut all = vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/"),
        (":authority", "orders.test"),
        ("content-type", "text/plain"),
    ];
    if !key.is_empty() {
        all.push(("idempotency-key", key));
    }
    all.extend(more);
    fields(&all)
}

/// The next frame: its kind, flags, stream and payload.
async fn next(wire: &mut Wire) -> (u8, u8, u32, Vec<u8>) {
    let head = wire.take(9).await;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    (head[3], head[4], stream, wire.take(usize::try_from(length).unwrap()).await)
}

async fn until_frame(wire: &mut Wire, kind: u8, flags: u8) -> (u32, Vec<u8>) {
    let found = async {
        loop {
            match next(wire).await {
                (k, f, stream, payload) if k == kind && f & flags == flags => return (stream, payload),
                _ => {}
            }
        }
    };
    within("a frame", found).await
}

/// A client of the sidecar that sends these settings.
async fn client(sidecar: &Sidecar, settings: &[u8]) -> Wire {
    let mut wire = sidecar.connect().await;
    wire.send([PREFACE, &frame(SETTINGS, 0, 0, settings)].concat()).await;
    wire
}

#[tokio::test]
async fn responses_that_no_client_reads_are_bounded() {
    // The response is larger than the buffers of the kernel, and the window is zero.
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n{}", "x".repeat(200_000));
    let service = Service::new().await.answers(String::leak(response));
    let sidecar = Sidecar::start(service.address, &["--response-budget=1MiB", "--threads=2"]).await;
    let no_window = [0, 4, 0, 0, 0, 0];
    let mut wire = client(&sidecar, &no_window).await;
    for number in 0..40_u32 {
        let stream = 2 * number + 1;
        let head = post(&format!("intent-{number}"), &[]);
        wire.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, &head)).await;
        // The request was executed, or refused.
        until_frame(&mut wire, HEADERS, END_HEADERS).await;
    }
    // The budget holds five responses; one more request is executed while any space is left.
    assert!((5..=7).contains(&service.requests()), "{} were executed", service.requests());
}
