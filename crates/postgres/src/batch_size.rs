//! The number of commands in a batch, which falls while the server is slow.
//!
//! A batch that takes longer than the command timeout is lost for all of its commands, although the server goes on with it.
//! Batches are largest under overload. With a fixed size, a server that needs 20 ms for each row would lose every batch of 128
//! rows and answer nothing, although it could answer 50 rows a second on each connection.
//!
//! ```text
//! the batch took less than a quarter of the timeout and was full   grow by half
//! it took less than half of the timeout                            keep the size
//! it took longer and was at least half full                        halve the size
//! it took longer, and so did a batch of another size               the size is not the reason: restore the larger one, and grow
//! ```

use std::time::Duration;

/// The first size. It grows within a few batches.
const FIRST: usize = 16;

/// The size of the batches of one kind of command.
#[derive(Debug)]
pub(crate) struct BatchSize {
    now: usize,
    max: usize,
    /// The time after which a batch is given up.
    timeout: Duration,
    /// The size and the time of the last slow batch, if no batch was quick since.
    last_slow: Option<(usize, Duration)>,
}

impl BatchSize {
    pub(crate) fn new(max: usize, timeout: Duration) -> Self {
        Self { now: max.min(FIRST), max, timeout, last_slow: None }
    }

    /// The most commands that the next batch may have, at least 1.
    pub(crate) const fn now(&self) -> usize {
        self.now
    }

    /// Notes the time that a batch of this size took.
    pub(crate) fn took(&mut self, commands: usize, took: Duration) {
        if took <= self.timeout / 2 {
            self.last_slow = None;
            if commands >= self.now && took < self.timeout / 4 {
                self.grow();
            }
            return;
        }
        // A slow small batch is no information about large ones.
        if commands < self.now.div_ceil(2) {
            return;
        }
        match self.last_slow.replace((commands, took)) {
            // A size at which a batch was given up is not tried again until some batches were quick.
            Some((before, took_before))
                if took_before < self.timeout && commands * 4 <= before * 3 && took * 4 > took_before * 3 =>
            {
                self.now = self.now.max(before);
                self.grow();
            }
            _ => self.now = self.now.min((commands / 2).max(1)),
        }
    }

    fn grow(&mut self) {
        self.now = (self.now + self.now / 2 + 1).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    /// Runs batches that are always full, with a time for each batch and for each command in milliseconds. Returns the number
    /// of commands that were answered in `time`, and of batches that were given up.
    fn answered(size: &mut BatchSize, batch: u64, command: u64, time: Duration) -> (usize, usize) {
        let (mut left, mut answered, mut lost) = (time, 0, 0);
        loop {
            let commands = size.now();
            let took = Duration::from_millis(batch + command * commands as u64);
            let Some(rest) = left.checked_sub(took.min(TIMEOUT)) else { return (answered, lost) };
            left = rest;
            if took < TIMEOUT {
                answered += commands
            } else {
                lost += 1
            }
            size.took(commands, took.min(TIMEOUT));
        }
    }

    #[test]
    fn commands_that_take_long_are_answered_in_smaller_batches() {
        const MINUTE: Duration = Duration::from_secs(60);
        for command in [1, 5, 20, 50, 100, 300, 900] {
            let mut size = BatchSize::new(128, TIMEOUT);
            let (count, lost) = answered(&mut size, 5, command, MINUTE);
            let possible = MINUTE.as_millis() as usize / command as usize;
            assert!(count * 2 > possible && lost <= 3, "{command} ms: {count} of {possible}, {lost} lost");
        }
    }

    #[test]
    fn a_server_that_becomes_slow_costs_few_batches_and_is_used_again_when_it_recovers() {
        let mut size = BatchSize::new(128, TIMEOUT);
        answered(&mut size, 5, 0, Duration::from_secs(1));
        assert_eq!(size.now(), 128);
        let (count, lost) = answered(&mut size, 5, 50, Duration::from_secs(60));
        assert!(count > 600 && lost <= 2, "{count}, {lost} lost");
        assert!(size.now() < 40);
        answered(&mut size, 5, 0, Duration::from_secs(1));
        assert_eq!(size.now(), 128);
    }

    #[test]
    fn batches_that_are_slow_at_any_size_stay_large() {
        for batch in [400, 1100, 1700] {
            let mut size = BatchSize::new(128, TIMEOUT);
            answered(&mut size, batch, 0, Duration::from_secs(100));
            let (count, lost) = answered(&mut size, batch, 0, Duration::from_secs(600));
            let possible = 128 * 600_000 / batch as usize;
            assert!(count * 2 > possible && lost == 0, "{batch} ms: {count} of {possible}");
        }
    }

    #[test]
    fn small_batches_say_nothing_about_full_ones() {
        let mut size = BatchSize::new(128, TIMEOUT);
        size.took(1, TIMEOUT);
        size.took(15, Duration::from_millis(1));
        assert_eq!(size.now(), 16);
        let mut one = BatchSize::new(1, TIMEOUT);
        one.took(1, TIMEOUT);
        one.took(1, Duration::ZERO);
        assert_eq!(one.now(), 1);
    }
}
