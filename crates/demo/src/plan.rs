//! The plan of a demonstration, drawn from the seed before the runs start.
//!
//! Both runs follow the same plan: the same payments, the same double clicks, and the same fault for each request of each
//! client. The faults hit the first requests of a client, and its later requests meet none. So every planned fault happens,
//! and every client succeeds in the end.

use std::time::Duration;

use serde::Serialize;

/// A fault that the network, or the client itself, inflicts on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    /// The connection is reset before the request reaches a server.
    RequestLost,
    /// The request arrives after the client has given up waiting for its response.
    RequestLate,
    /// The request is delivered; the connection is reset before the response.
    ResponseLost,
    /// The request is delivered; the connection closes in the middle of the response.
    ResponseCut,
    /// The request is delivered; the response takes longer than the client waits.
    ResponseLate,
    /// The client hangs up before the response, and comes back.
    HangUp,
}

impl Fault {
    /// The weights of the faults. Lost responses have the largest, because they are the subject of the demonstration.
    const WEIGHTS: [(Self, u64); 6] = [
        (Self::ResponseLost, 30),
        (Self::HangUp, 18),
        (Self::RequestLost, 16),
        (Self::ResponseLate, 14),
        (Self::ResponseCut, 12),
        (Self::RequestLate, 10),
    ];

    fn draw(random: &mut SplitMix64) -> Self {
        let total = Self::WEIGHTS.iter().map(|(_, weight)| weight).sum();
        let mut left = random.below(total);
        for (fault, weight) in Self::WEIGHTS {
            if left < weight {
                return fault;
            }
            left -= weight;
        }
        Self::ResponseLost
    }

    /// The title of the fault in the output, and its description.
    pub(crate) const fn describe(self) -> (&'static str, &'static str) {
        match self {
            Self::RequestLost => ("request lost", "it never arrives → the client retries with the same key"),
            Self::RequestLate => {
                ("request late", "the client gives up and retries; then the first request arrives after all")
            }
            Self::ResponseLost => {
                ("response lost", "served, but the response gets lost → the client retries with the same key")
            }
            Self::ResponseCut => {
                ("response cut", "it breaks off in the middle → the client retries with the same key")
            }
            Self::ResponseLate => {
                ("timeout", "the response takes too long → the client retries with the same key")
            }
            Self::HangUp => {
                ("hang-up", "the customer leaves before the response, comes back and tries again")
            }
        }
    }
}

/// The number of faults of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FaultCounts {
    pub(crate) request_lost: u64,
    pub(crate) request_late: u64,
    pub(crate) response_lost: u64,
    pub(crate) response_cut: u64,
    pub(crate) response_late: u64,
    pub(crate) hang_up: u64,
}

impl FaultCounts {
    pub(crate) const fn add(&mut self, fault: Fault) {
        let count = match fault {
            Fault::RequestLost => &mut self.request_lost,
            Fault::RequestLate => &mut self.request_late,
            Fault::ResponseLost => &mut self.response_lost,
            Fault::ResponseCut => &mut self.response_cut,
            Fault::ResponseLate => &mut self.response_late,
            Fault::HangUp => &mut self.hang_up,
        };
        *count += 1;
    }

    pub(crate) const fn total(&self) -> u64 {
        self.request_lost + self.responses_lost()
    }

    /// Responses that were given and not seen by the client.
    pub(crate) const fn responses_lost(&self) -> u64 {
        self.request_late + self.response_lost + self.response_cut + self.response_late + self.hang_up
    }
}

/// One payment that a customer wants to make once.
#[derive(Clone, Debug)]
pub(crate) struct Intent {
    /// Counts from one.
    pub(crate) number: usize,
    pub(crate) customer: String,
    pub(crate) cents: u64,
    /// The idempotency key: one per intent, the same in every request for it.
    pub(crate) key: String,
    /// One click, or two for a double click. Each sends its own requests, until it has a response.
    pub(crate) clicks: Vec<Click>,
}

impl Intent {
    /// The name of the intent at the payments service.
    pub(crate) fn name(&self) -> String {
        format!("payment-{}", self.number)
    }

    /// The label of one request, as ordinary clients send it in `X-Request-Id`.
    pub(crate) fn request_id(&self, click: usize, attempt: usize) -> String {
        format!("{}/{click}/{attempt}", self.number)
    }
}

/// One press of the button.
#[derive(Clone, Debug)]
pub(crate) struct Click {
    /// The delay after the first click.
    pub(crate) after: Duration,
    /// The faults of its first requests, one each. The requests after them meet no fault.
    pub(crate) faults: Vec<Fault>,
    /// The time after which the client hangs up, if that is the fault.
    pub(crate) hang_up_after: Duration,
}

/// The plan: all payments with their clicks and faults.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) intents: Vec<Intent>,
}

impl Plan {
    pub(crate) fn draw(seed: u64, intents: usize) -> Self {
        let intents = (1..=intents).map(|number| draw_intent(seed, number)).collect();
        Self { seed, intents }
    }

    /// The fault of the request with this label; `None` for no fault, and for unknown labels.
    pub(crate) fn fault(&self, request_id: &str) -> Option<Fault> {
        let mut parts = request_id.split('/').map(str::parse::<usize>);
        let (number, click, attempt) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
        let intent = self.intents.get(number.checked_sub(1)?)?;
        intent.clicks.get(click)?.faults.get(attempt).copied()
    }

    /// The time that the service takes for the `nth` request that it executes for an intent: 5 to 60 milliseconds.
    pub(crate) fn service_time(&self, intent: &str, nth: usize) -> Duration {
        let label = intent.bytes().fold(nth as u64, |hash, byte| hash.wrapping_mul(31) ^ u64::from(byte));
        Duration::from_micros(5_000 + SplitMix64::fork(self.seed, Stream::Service, label).below(55_000))
    }

    /// The random stream of a client's own choices: the jitter of its backoff.
    pub(crate) fn jitter(&self, intent: usize, click: usize) -> SplitMix64 {
        SplitMix64::fork(self.seed, Stream::Jitter, (intent * 2 + click) as u64)
    }

    pub(crate) fn cents(&self) -> u64 {
        self.intents.iter().map(|intent| intent.cents).sum()
    }

    pub(crate) fn double_clicks(&self) -> usize {
        self.intents.iter().filter(|intent| intent.clicks.len() > 1).count()
    }

    pub(crate) fn faults(&self) -> FaultCounts {
        let mut counts = FaultCounts::default();
        self.intents.iter().flat_map(|i| &i.clicks).flat_map(|c| &c.faults).for_each(|f| counts.add(*f));
        counts
    }
}

fn draw_intent(seed: u64, number: usize) -> Intent {
    let mut random = SplitMix64::fork(seed, Stream::Intent, number as u64);
    let customer = format!("customer-{:02}", 1 + random.below(40));
    let cents = 99 + random.below(25_000);
    let key = uuid(&mut random);
    let clicks = if random.below(100) < 15 { 2 } else { 1 };
    let clicks = (0..clicks).map(|click| {
        let after = Duration::from_millis(if click == 0 { 0 } else { random.below(25) });
        let faults = match random.below(100) {
            0..50 => 0,
            50..82 => 1,
            82..95 => 2,
            _ => 3,
        };
        let faults = (0..faults).map(|_| Fault::draw(&mut random)).collect();
        Click { after, faults, hang_up_after: Duration::from_millis(10 + random.below(30)) }
    });
    Intent { number, customer, cents, key, clicks: clicks.collect() }
}

/// A key: a UUID of version 4, as clients make it, but from the seed.
fn uuid(random: &mut SplitMix64) -> String {
    let (a, b) = (random.next(), random.next());
    format!(
        "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xfff,
        0x8000 | (b >> 48) & 0x3fff,
        b & 0xffff_ffff_ffff
    )
}

/// The independent random streams.
#[derive(Clone, Copy)]
enum Stream {
    Intent,
    Service,
    Jitter,
}

/// Small, fast, and the same on every machine (Steele, Lea and Flood, 2014). Nothing here is secret.
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    fn fork(seed: u64, stream: Stream, label: u64) -> Self {
        let mut random = Self(seed);
        let mut random = Self(random.next() ^ stream as u64);
        Self(random.next() ^ label)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, evenly distributed for the small bounds of the demonstration.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn the_same_seed_is_the_same_plan_and_another_is_another() {
        let text = |seed, intents| format!("{:?}", &Plan::draw(seed, intents).intents[..50]);
        assert_eq!(text(7, 50), text(7, 60));
        assert_ne!(text(7, 50), text(8, 50));
    }

    #[test]
    fn every_key_is_another_and_looks_like_a_uuid() {
        let plan = Plan::draw(1, 500);
        let keys: std::collections::HashSet<_> = plan.intents.iter().map(|intent| &intent.key).collect();
        assert_eq!(keys.len(), 500);
        for key in keys {
            let lengths: Vec<_> = key.split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12], "{key}");
            assert_eq!(key.as_bytes()[14], b'4', "{key}");
            assert!(b"89ab".contains(&key.as_bytes()[19]), "{key}");
        }
    }

    #[test]
    fn there_are_no_faults_but_the_planned_ones() {
        let plan = Plan::draw(5, 200);
        let mut seen = 0;
        for intent in &plan.intents {
            for (number, click) in intent.clicks.iter().enumerate() {
                for attempt in 0..10 {
                    let fault = plan.fault(&intent.request_id(number, attempt));
                    assert_eq!(fault, click.faults.get(attempt).copied());
                    seen += u64::from(fault.is_some());
                }
            }
        }
        assert_eq!(seen, plan.faults().total());
        for label in ["", "0/0/0", "201/0/0", "1/9/0", "1/0/99", "x/y/z", "1/0"] {
            assert_eq!(plan.fault(label), None, "{label}");
        }
    }

    #[test]
    fn the_service_takes_five_to_sixty_milliseconds() {
        let plan = Plan::draw(5, 1);
        for nth in 0..500 {
            let time = plan.service_time("payment-1", nth);
            assert!((Duration::from_millis(5)..=Duration::from_millis(60)).contains(&time), "{time:?}");
            assert_eq!(time, plan.service_time("payment-1", nth));
        }
    }
}
