//! Steps: the finished parts of an operation, so that the next attempt continues after them.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::limits;

/// A finished part of an operation and its result. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Step {
    name: Arc<str>,
    result: Bytes,
}

/// The reason why a step cannot be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepLimitError {
    /// The name is empty, longer than [`limits::MAX_STEP_NAME_BYTES`] bytes, or has a NUL, which PostgreSQL cannot store.
    #[error("the name of a step has 1 to {} bytes, and no NUL", limits::MAX_STEP_NAME_BYTES)]
    Name,
    /// Name and result have more than [`limits::MAX_STEPS_BYTES`] bytes.
    #[error(
        "the result of the step has {bytes} bytes; all of a record's steps may have {} together",
        limits::MAX_STEPS_BYTES
    )]
    TooLarge {
        /// The length of the result.
        bytes: usize,
    },
}

impl Step {
    /// A step with this name and result. To a store, results are bytes.
    ///
    /// # Errors
    /// [`StepLimitError`] if the name or the result is out of its bounds.
    pub fn new(name: &str, result: Bytes) -> Result<Self, StepLimitError> {
        if name.is_empty() || name.len() > limits::MAX_STEP_NAME_BYTES || name.contains('\0') {
            return Err(StepLimitError::Name);
        }
        if name.len() + result.len() > limits::MAX_STEPS_BYTES {
            return Err(StepLimitError::TooLarge { bytes: result.len() });
        }
        Ok(Self { name: name.into(), result })
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The result.
    #[must_use]
    pub const fn result(&self) -> &Bytes {
        &self.result
    }

    /// The length of name and result together, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.name.len() + self.result.len()
    }
}

/// Leaves the result out, because it may be secret.
impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({} bytes)", self.name, self.result.len())
    }
}

/// The steps of a record, in the order in which they were finished. Cheap to clone; an empty list takes no memory.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Steps(Option<Arc<Vec<Step>>>);

impl Steps {
    pub(crate) const NONE: Self = Self(None);

    /// The steps as a slice.
    #[must_use]
    pub fn as_slice(&self) -> &[Step] {
        self.0.as_ref().map_or(&[], |steps| steps.as_slice())
    }

    /// The number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Returns true if there are no steps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// The length of all names and results together, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.as_slice().iter().map(Step::size).sum()
    }

    /// Returns true if one more step fits: [`limits::MAX_STEPS`], [`limits::MAX_STEPS_BYTES`].
    #[must_use]
    pub fn can_hold(&self, step: &Step) -> bool {
        self.len() < limits::MAX_STEPS && self.size() + step.size() <= limits::MAX_STEPS_BYTES
    }

    /// The same steps with other results, one for each; `None` if they exceed [`limits::MAX_STEPS_BYTES`].
    pub(crate) fn with_results<'a>(&self, results: impl Iterator<Item = &'a Bytes>) -> Option<Self> {
        let steps: Self = self
            .as_slice()
            .iter()
            .zip(results)
            .map(|(step, result)| Step { name: step.name.clone(), result: result.clone() })
            .collect();
        (steps.size() <= limits::MAX_STEPS_BYTES).then_some(steps)
    }

    /// These steps and one more.
    #[must_use]
    pub(crate) fn with(&self, step: Step) -> Self {
        self.as_slice().iter().cloned().chain([step]).collect()
    }
}

impl FromIterator<Step> for Steps {
    fn from_iter<I: IntoIterator<Item = Step>>(steps: I) -> Self {
        let steps: Vec<_> = steps.into_iter().collect();
        Self((!steps.is_empty()).then(|| Arc::new(steps)))
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: usize, result: usize) -> Result<Step, StepLimitError> {
        Step::new(&"n".repeat(name), Bytes::from(vec![0; result]))
    }

    #[test]
    fn a_name_and_a_result_are_bounded() {
        assert!(step(1, 0).is_ok() && step(limits::MAX_STEP_NAME_BYTES, 0).is_ok());
        assert_eq!(step(0, 0), Err(StepLimitError::Name));
        assert_eq!(step(limits::MAX_STEP_NAME_BYTES + 1, 0), Err(StepLimitError::Name));
        assert_eq!(Step::new("a\0b", Bytes::new()), Err(StepLimitError::Name));
        assert!(step(1, limits::MAX_STEPS_BYTES - 1).is_ok());
        let bytes = limits::MAX_STEPS_BYTES;
        assert_eq!(step(1, bytes), Err(StepLimitError::TooLarge { bytes }));
    }

    #[test]
    fn all_steps_together_are_bounded() {
        let small = step(1, 0).unwrap();
        let many: Steps = (1..limits::MAX_STEPS).map(|_| small.clone()).collect();
        assert!(many.can_hold(&small));
        assert!(!many.with(small.clone()).can_hold(&small));
        let large: Steps = [step(1, limits::MAX_STEPS_BYTES - 2).unwrap()].into_iter().collect();
        assert!(large.can_hold(&small));
        assert!(!large.can_hold(&step(1, 1).unwrap()));
    }
}
