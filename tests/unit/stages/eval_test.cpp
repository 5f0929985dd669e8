#include "stages/eval/eval.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "format/json.h"
#include "unit/stages/small_checkpoint.h"
#include "unit/stages/test_files.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;

TEST(EvalStage, equal_models_give_exactly_zero_and_neither_chunks_nor_threads_change_a_bit) {
  const test::TempFolder dir;
  ThreadPool pool(2);
  SilentProgress progress;
  const auto native = Model::load(test::small_checkpoint_dir(), {}, pool).value();
  test::write_small_checkpoint(dir / "other", 1);  // other experts behind the same router
  const auto other = Model::load((dir / "other").string(), {}, pool).value();
  Dataset panel;
  panel.rows = test::random_token_rows({100, 30, 1, 60}, "panel");
  const EvalOptions eval;
  const EvalResult same = evaluate_kl(*native, *native, panel, eval, progress, pool).value();
  EXPECT_EQ(same.total.kl, 0.0);
  EXPECT_EQ(same.total.top1(), 1.0);
  EXPECT_EQ(same.total.positions, 99 + 29 + 59);
  EXPECT_EQ(same.unscored_rows, 1);
  const EvalResult pair = evaluate_kl(*native, *other, panel, eval, progress, pool).value();
  EXPECT_GT(pair.total.kl_mean(), 1e-4);
  EXPECT_LT(pair.total.top1(), 1.0);
  EXPECT_EQ(pair.total.nll_reference, same.total.nll_reference);

  ThreadPool one(1);
  EvalOptions chunked;
  chunked.chunk = 7;
  const EvalResult again = evaluate_kl(*native, *other, panel, chunked, progress, one).value();
  EXPECT_EQ(again.sidecar.kl, pair.sidecar.kl);
  EXPECT_EQ(again.total.kl, pair.total.kl);
  ASSERT_EQ(pair.sidecar.row.size(), 187u);
  const Json record = parse_json(eval_record(pair, {}), "record").value();
  EXPECT_DOUBLE_EQ(record["kl_mean"], pair.total.kl_mean());
  EXPECT_EQ(record["domains"].size(), 2u);
  EXPECT_EQ(record["domains"]["a"]["positions"], 99);
  EXPECT_DOUBLE_EQ(record["kl_domain_mean"], (pair.domains[0].sums.kl_mean() + pair.domains[1].sums.kl_mean()) / 2);
  const EvalResult ppl = evaluate_ppl(*other, panel, eval, progress, pool).value();
  EXPECT_EQ(ppl.total.nll_reference, pair.total.nll_candidate);
}

TEST(EvalStage, panels_that_do_not_fit_or_score_nothing_are_refused) {
  ThreadPool pool(1);
  SilentProgress progress;
  const auto native = Model::load(test::small_checkpoint_dir(), {}, pool).value();
  Dataset panel;
  panel.rows = test::random_token_rows({10}, "panel");
  std::fill(panel.rows[0].role_mask.begin(), panel.rows[0].role_mask.end(), 0);
  EXPECT_THAT(evaluate_ppl(*native, panel, {}, progress, pool).error().message(), HasSubstr("no scored positions"));
  panel.rows[0].ids[4] = 4000;
  EXPECT_THAT(evaluate_ppl(*native, panel, {}, progress, pool).error().message(), HasSubstr("id 4000 at position 4"));
}

}  // namespace
}  // namespace espalier
