//! Metrics of the cache before a store, for Prometheus.

use std::fmt;

use oncegate_cache::CacheStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// The numbers of a cache, read at each scrape.
#[derive(Debug)]
pub(crate) struct CacheCollector(pub(crate) CacheStats);

impl Collector for CacheCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.0.counts();
        let claims = [
            ("hit", counts.hits),
            ("miss", counts.misses),
            ("error", counts.errors),
            ("skipped", counts.skipped),
        ];
        let writes = [("filled", counts.populated), ("failed", counts.failed), ("shed", counts.shed)];
        let families = [
            ("cache_claims", "Claims, by the reply of the cache", &claims[..]),
            ("cache_fills", "Writes of responses to the cache, by result", &writes[..]),
        ];
        for (name, help, results) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (result, count) in results {
                ConstCounter::new(*count).encode(family.encode_family(&[("result", *result)])?)?;
            }
        }
        let gauges = [
            ("cache_pending", "Responses that wait to be written to the cache", counts.pending),
            ("cache_out", "1 while the cache is not used, because it did not answer", counts.is_out.into()),
        ];
        for (name, help, value) in gauges {
            let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}
