//! The number of commands in a batch, which falls while the server is slow.
//!
//! A batch that takes longer than the command time-out is lost for all of its commands, and the server goes on with it in vain.
//! Batches are largest under overload. With a fixed size, a server that needs 20 ms for each row would lose every batch of 128
//! rows, and answer nothing at all, although it could answer 50 rows a second on each connection.
//!
//! ```text
//! took less than a quarter of the time-out, and was full   grow by half
//! took less than half of it                                 stay
//! took more, and was at least half full                     halve
//! took more, as one of another size did                     size is not what makes it slow: back to the larger one, and grow
//! ```

use std::time::Duration;

/// Where it begins. It grows within a few batches.
const FIRST: usize = 16;

/// The size of the batches of one kind of command.
#[derive(Debug)]
pub(crate) struct BatchSize {
    now: usize,
    max: usize,
    /// After it a batch is given up.
    timeout: Duration,
    /// The size and the time of the last batch that was slow, if none was quick since.
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

    /// Takes note of a batch of so many commands that took so long.
    pub(crate) fn took(&mut self, commands: usize, took: Duration) {
        if took <= self.timeout / 2 {
            self.last_slow = None;
            if commands >= self.now && took < self.timeout / 4 {
                self.grow();
            }
            return;
        }
        // A small batch that is slow tells nothing of large ones.
        if commands < self.now.div_ceil(2) {
            return;
        }
        match self.last_slow.replace((commands, took)) {
            // A size at which a batch was given up is not tried again before some were quick.
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

    /// Batches that are always full, with a time for each batch and for each command in milliseconds: how many commands were
    /// answered in this time, and how many batches were given up.
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
    fn what_is_slow_whatever_its_size_stays_large() {
        for batch in [400, 1100, 1700] {
            let mut size = BatchSize::new(128, TIMEOUT);
            answered(&mut size, batch, 0, Duration::from_secs(100));
            let (count, lost) = answered(&mut size, batch, 0, Duration::from_secs(600));
            let possible = 128 * 600_000 / batch as usize;
            assert!(count * 2 > possible && lost == 0, "{batch} ms: {count} of {possible}");
        }
    }

    #[test]
    fn batches_that_are_not_full_tell_nothing_of_full_ones() {
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
