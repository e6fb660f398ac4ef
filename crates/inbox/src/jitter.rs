//! Random pauses.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

/// Returns a random duration between half of the pause and the whole, so that consumers do not try again in step.
#[must_use]
pub fn jittered(pause: Duration) -> Duration {
    // The seed of each state is another one.
    let bits = RandomState::new().build_hasher().finish() as u32;
    pause.mul_f64(0.5 + f64::from(bits) / 2.0 / 4_294_967_296.0)
}
