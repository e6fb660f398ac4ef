//! Settings out of their bounds.

use std::convert::Infallible;
use std::fmt;
use std::ops::RangeInclusive;

/// A setting out of its bounds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    /// An error that names the setting and its bounds.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// Returns the value if it is within its bounds. `name` names the value in the error.
    ///
    /// # Errors
    /// If it is out of bounds.
    pub fn check<T: PartialOrd + fmt::Debug>(
        name: &str,
        value: T,
        bounds: RangeInclusive<T>,
    ) -> Result<T, Self> {
        if bounds.contains(&value) {
            return Ok(value);
        }
        let (least, most) = bounds.into_inner();
        Err(Self(format!("{name} is {value:?}; it must be from {least:?} to {most:?}")))
    }
}

/// A conversion that cannot fail has no invalid value.
impl From<Infallible> for ConfigError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_out_of_its_bounds_is_named() {
        assert_eq!(ConfigError::check("the number of tries", 1, 1..=100), Ok(1));
        let error = ConfigError::check("the number of tries", 0, 1..=100).unwrap_err();
        assert_eq!(error.to_string(), "the number of tries is 0; it must be from 1 to 100");
    }
}
