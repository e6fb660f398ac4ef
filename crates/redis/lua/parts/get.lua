value = redis.pcall('GET', key)
